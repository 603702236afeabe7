"""Staging: the folder of one batch, from when it is begun until all of it is settled.

rows/       the deliveries, as they came
new/        the messages that are new, as the tasks wrote them which claimed them
told/       what the tasks of a job came to
staged, in_doubt    marks, that are there or not
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
    """`folder` is a path, or a URI that Arrow knows (s3:, gs:, hdfs:): what is there is seen by the
    program and by Spark.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.rows = f"{folder}/rows"

    def new_file(self) -> str:
        """The name of a file for messages that are new; no other attempt has it."""
        return f"{uuid4().hex}.parquet"

    def path_of(self, new_file: str) -> str:
        """Where that is."""
        return f"{self.folder}/new/{new_file}"

    def has(self, new_files: Sequence[str]) -> bool:
        """Whether all of these are there still."""
        files, _ = FileSystem.from_uri(self.folder)
        paths = [FileSystem.from_uri(self.path_of(name))[1] for name in new_files]
        return all(found.type is FileType.File for found in files.get_file_info(paths))

    @property
    def is_there(self) -> bool:
        """Whether any of it is there still."""
        files, path = FileSystem.from_uri(self.folder)
        return bool(files.get_file_info(path).type is not FileType.NotFound)

    @property
    def is_staged(self) -> bool:
        """Whether all rows are in it."""
        return self._is_marked(_STAGED)

    def mark_staged(self) -> None:
        """All rows are in it."""
        self._mark(_STAGED)

    @property
    def is_told_in_doubt(self) -> bool:
        """Whether its messages are known to be in doubt."""
        return self._is_marked(_IN_DOUBT)

    def mark_told_in_doubt(self) -> None:
        """Its messages are known to be in doubt."""
        self._mark(_IN_DOUBT)

    def tell(self, name: str, told: Mapping[str, Any]) -> None:
        """Leave what a job came to."""
        self._write(f"told/{name}", json.dumps(told).encode())

    def told(self, name: str) -> Any:
        """What that job came to."""
        files, path = FileSystem.from_uri(self.folder)
        with files.open_input_stream(f"{path}/told/{name}") as file:
            return json.loads(file.read())

    def remove(self) -> None:
        """It is not needed any more."""
        files, path = FileSystem.from_uri(self.folder)
        # Another program may be at it, too.
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
