"""What every starter keeps to, and the index of the examples."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.examples.running import EXAMPLES

STARTERS = sorted(path.parent for path in EXAMPLES.glob("*/Makefile"))
_MOST_LINES = 60
_ONE_SCREEN = 45


def lines_of_code(program: Path) -> int:
    """Without blank lines, comments and docstrings."""
    module = ast.parse(program.read_text())
    for node in ast.walk(module):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if ast.get_docstring(node) is not None:
                    node.body = node.body[1:]
    counted = {node.lineno for node in ast.walk(module) if isinstance(node, ast.stmt | ast.expr)}
    ends = {node.end_lineno for node in ast.walk(module) if isinstance(node, ast.stmt | ast.expr)}
    return len(counted | ends)


def test_all_are_here() -> None:
    """Those that are promised."""
    names = {"airflow", "celery", "django", "fastapi", "faststream", "flask", "script"}
    assert {folder.name for folder in STARTERS} == {*names, "kafka_pipeline", "spark_pipeline"}


@pytest.mark.parametrize("folder", STARTERS, ids=lambda folder: folder.name)
def test_is_small(folder: Path) -> None:
    """At most 60 lines of code, and a README of one screen that says what to install."""
    assert sum(map(lines_of_code, folder.rglob("*.py"))) <= _MOST_LINES
    page = (folder / "README.md").read_text()
    assert len(page.splitlines()) <= _ONE_SCREEN
    assert "pip install" in page


@pytest.mark.parametrize("folder", STARTERS, ids=lambda folder: folder.name)
def test_runs_where_it_was_copied_to(folder: Path, tmp_path: Path) -> None:
    """Away from a checkout it takes the Python that comes first, such as that of a venv."""
    copied = shutil.copytree(folder, tmp_path / "copied" / folder.name)
    command = ["make", "--dry-run", "--no-print-directory", "-C", str(copied)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert re.search(r"^python3 ", said, re.MULTILINE)
    assert ".venv" not in said


def test_index() -> None:
    """The index links every example, and no link in it or in a starter's page is dead."""
    pages = [EXAMPLES / "README.md", *(folder / "README.md" for folder in STARTERS)]
    for page in pages:
        links = re.findall(r"\]\(([^)#:]+)", page.read_text())
        assert [link for link in links if not (page.parent / link).is_file()] == []
    linked = set(re.findall(r"\]\((\w+)/", pages[0].read_text()))
    assert linked == {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
