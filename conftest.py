"""The Python in README.md and docs/ runs as tests, each file in a folder of its own."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser


@pytest.fixture(scope="module")
def in_a_folder_of_its_own() -> Iterator[None]:
    """Examples may write beside themselves."""
    before = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        yield
        os.chdir(before)


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["*.md"],
    fixtures=["in_a_folder_of_its_own"],
).pytest()
