"""The public names have the types that `typing_tests` says: pyright is asked; mypy is, by
`make check`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pyright() -> Path:
    """The program, which runs on Node.js and fetches itself from npm at its first use."""
    if shutil.which("node") is None:
        pytest.skip("pyright runs on Node.js, which is not on this machine: apt-get install nodejs")
    program = Path(sys.executable).with_name("pyright")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    if said.returncode != 0:
        pytest.skip(f"pyright cannot be had from npm: {said.stderr[-300:]}")
    return program


def test_pyright(pyright: Path) -> None:
    """Every `assert_type` holds, every error that is expected is found, and no other."""
    quiet = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    command: list[str | Path] = [pyright, "--pythonpath", sys.executable]
    said = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False, timeout=300
    )
    assert said.returncode == 0, said.stdout
