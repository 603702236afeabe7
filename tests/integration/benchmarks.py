"""Runs a benchmark in a small size."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def measured(name: str, *arguments: str, file: Path) -> tuple[Any, str]:
    """What the benchmark of that name has written to `file`, and what it said beside."""
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / f"{name}.py", *arguments, "--json", str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(file.read_text()), ran.stderr
