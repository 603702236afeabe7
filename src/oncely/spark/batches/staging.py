"""StagingFolder: the folder of one batch, from its beginning until all its messages are settled.

rows/       the deliveries, unchanged
new/        the new messages, written by the tasks that claimed them
told/       the reports of jobs
staged, in_doubt    empty files that mark a state
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import Schema
from pyarrow.fs import FileSelector, FileSystem, FileType

STAGED = "staged"
"""The mark that all rows are stored."""
IN_DOUBT = "in_doubt"
"""The mark that all messages are in doubt."""


def folders_in(root: str) -> list[str]:
    """The names of the folders there: the keys of batches, which may be another ledger's."""
    files, path = FileSystem.from_uri(root)
    found = files.get_file_info(FileSelector(path, allow_not_found=True))
    return [each.base_name for each in found if each.type is FileType.Directory]


class StagingFolder:
    """`folder` is a path, or a URI that Arrow knows (s3:, gs:, hdfs:). The program and Spark must
    both see it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.rows = f"{folder}/rows"
        self._files, self._path = FileSystem.from_uri(folder)

    def new_file(self, schema: Schema) -> tuple[str, pq.ParquetWriter]:
        """Create a file for new messages, whose name no other attempt has."""
        name = f"new/{uuid4().hex}.parquet"
        self._files.create_dir(f"{self._path}/new", recursive=True)
        return name, pq.ParquetWriter(f"{self._path}/{name}", schema, filesystem=self._files)

    def read(self, names: Sequence[str], columns: Sequence[str] | None = None) -> pa.Table:
        """The new messages in these files."""
        paths = [f"{self._path}/{name}" for name in names]
        return pa.concat_tables(
            [pq.read_table(path, columns=columns, filesystem=self._files) for path in paths]
        )

    def has(self, *names: str) -> bool:
        """Whether the folder has these files: a mark, or new files."""
        paths = [f"{self._path}/{name}" for name in names]
        return all(found.type is FileType.File for found in self._files.get_file_info(paths))

    @property
    def is_there(self) -> bool:
        """Whether any part of the folder is still there."""
        return bool(self._files.get_file_info(self._path).type is not FileType.NotFound)

    def write(self, name: str, content: str = "") -> None:
        """Store a file: a mark, which is empty, or the report of a job."""
        path = f"{self._path}/{name}"
        self._files.create_dir(path.rpartition("/")[0], recursive=True)
        with self._files.open_output_stream(path) as file:
            file.write(content.encode())

    def told(self, name: str) -> Any:
        """The report of a job, which is stored as that file."""
        with self._files.open_input_stream(f"{self._path}/{name}") as file:
            return json.loads(file.read())

    def claimed(self) -> Any:
        """The report of a job that has claimed new messages, if there is one."""
        found = self._files.get_file_info(FileSelector(f"{self._path}/told", allow_not_found=True))
        for each in found:
            # A program may have been killed while it wrote one.
            with suppress(ValueError):
                if (told := self.told(f"told/{each.base_name}"))["files"]:
                    return told
        return None

    def remove(self) -> None:
        """Remove the folder."""
        # Another program may be removing it, too.
        with suppress(FileNotFoundError):
            self._files.delete_dir(self._path)
