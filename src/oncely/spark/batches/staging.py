"""Staging: the folder of one batch, from its beginning until all its messages are settled.

rows/       the deliveries, unchanged
new/        the new messages, written by the tasks that claimed them
told/       the reports of jobs
staged, in_doubt    empty files that mark a state
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from pyarrow.fs import FileSystem, FileType

_STAGED = "staged"
_IN_DOUBT = "in_doubt"


class Staging:
    """`folder` is a path, or a URI that Arrow knows (s3:, gs:, hdfs:). The program and Spark must
    both see it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.rows = f"{folder}/rows"

    def new_file(self) -> str:
        """A new name for a file of new messages, which no other attempt has."""
        return f"{uuid4().hex}.parquet"

    def path_of(self, new_file: str) -> str:
        """The path of that file."""
        return f"{self.folder}/new/{new_file}"

    def has(self, new_files: Sequence[str]) -> bool:
        """Whether all of these files are still there."""
        files, _ = FileSystem.from_uri(self.folder)
        paths = [FileSystem.from_uri(self.path_of(name))[1] for name in new_files]
        return all(found.type is FileType.File for found in files.get_file_info(paths))

    @property
    def is_there(self) -> bool:
        """Whether any part of the folder is still there."""
        files, path = FileSystem.from_uri(self.folder)
        return bool(files.get_file_info(path).type is not FileType.NotFound)

    @property
    def is_staged(self) -> bool:
        """Whether all rows are stored."""
        return self._is_marked(_STAGED)

    def mark_staged(self) -> None:
        """Mark that all rows are stored."""
        self._mark(_STAGED)

    @property
    def is_told_in_doubt(self) -> bool:
        """Whether its messages are marked as in doubt."""
        return self._is_marked(_IN_DOUBT)

    def mark_told_in_doubt(self) -> None:
        """Mark that its messages are in doubt."""
        self._mark(_IN_DOUBT)

    def tell(self, name: str, told: Mapping[str, Any]) -> None:
        """Store the report of a job."""
        self._write(f"told/{name}", json.dumps(told).encode())

    def told(self, name: str) -> Any:
        """The report of that job."""
        files, path = FileSystem.from_uri(self.folder)
        with files.open_input_stream(f"{path}/told/{name}") as file:
            return json.loads(file.read())

    def remove(self) -> None:
        """Remove the folder."""
        files, path = FileSystem.from_uri(self.folder)
        # Another program may be removing it, too.
        with suppress(FileNotFoundError):
            files.delete_dir(path)

    def _is_marked(self, name: str) -> bool:
        files, path = FileSystem.from_uri(self.folder)
        return bool(files.get_file_info(f"{path}/{name}").type is FileType.File)

    def _mark(self, name: str) -> None:
        self._write(name, b"")

    def _write(self, name: str, content: bytes) -> None:
        files, path = FileSystem.from_uri(self.folder)
        files.create_dir(f"{path}/{name}".rpartition("/")[0], recursive=True)
        with files.open_output_stream(f"{path}/{name}") as file:
            file.write(content)
