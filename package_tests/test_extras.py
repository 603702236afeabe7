"""Each extra brings all that it is for: with nothing else installed, its feature works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from package_tests.conftest import ROOT, Install

SMOKE = Path(__file__).with_name("smoke")
DRIVERS = {"asyncio": ["aiosqlite"]}
"""What users choose besides."""
SERVERS = {
    "postgresql": "postgresql_url",
    "mysql": "mysql_url",
    "redis": "redis_url",
    "kafka": "kafka_url",
    "rabbitmq": "rabbitmq_url",
    "nats": "nats_url",
    "sqs": "sqs_url",
}
EXTRAS = sorted(program.stem.removeprefix("with_") for program in SMOKE.glob("with_*.py"))


def readme_example(folder: Path) -> Path:
    """The first Python of README.md, as a program."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = folder / "readme.py"
    program.write_text(blocks[0])
    return program


def python_of(version: str) -> Path:
    """This Python, or another one that is on the machine."""
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == version:
        return Path(sys.executable)
    # pyenv puts a program of this name on the PATH for versions that are not switched on, too.
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [*root.glob(f"versions/{version}.*/bin/python"), shutil.which(f"python{version}")]
    for python in found:
        if python and subprocess.run([python, "-c", ""], check=False).returncode == 0:
            return Path(python)
    pytest.skip(f"Python {version} is not on this machine; bring it with uv python install")


def run(python: Path, program: Path, *arguments: str, path: str = os.environ["PATH"]) -> None:
    """Run it in a folder of its own, with what is installed beside `python` alone."""
    folder = python.parents[2] / program.stem
    folder.mkdir()
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    # Isolated: neither this folder's modules nor PYTHONPATH are found.
    command: list[str | Path] = [python, "-I", "-W", "error::FutureWarning", program, *arguments]
    # As in a venv that is activated: Spark's own Python is the one on the PATH.
    environment = {**kept, "PATH": f"{python.parent}{os.pathsep}{path}"}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=300)


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra(extra: str, install: Install, request: pytest.FixtureRequest) -> None:
    """With this extra alone, the first example of README.md and the extra's own feature work."""
    arguments = [request.getfixturevalue(SERVERS[extra])] if extra in SERVERS else []
    python = install([] if extra == "nothing" else [extra], *DRIVERS.get(extra, []))
    run(python, readme_example(python.parents[2]))
    run(python, SMOKE / f"with_{extra}.py", *arguments)


def test_java(install: Install, tmp_path: Path) -> None:
    """Spark runs by the Java of the extra `java` where the machine has none."""
    python = install(["java", "spark"])
    run(python, SMOKE / "with_spark.py", path=str(_programs_without_java(tmp_path / "programs")))


# Spark starts five times, among others: longer than other tests on a busy machine.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_all(version: str, install: Install, request: pytest.FixtureRequest) -> None:
    """With `all` every feature works, side by side, on every Python that the package names."""
    drivers = (package for each in DRIVERS.values() for package in each)
    python = install(["all"], *drivers, on=python_of(version))
    run(python, readme_example(python.parents[2]))
    for extra in EXTRAS:
        if extra != "nothing":
            arguments = [request.getfixturevalue(SERVERS[extra])] if extra in SERVERS else []
            run(python, SMOKE / f"with_{extra}.py", *arguments)


def _programs_without_java(folder: Path) -> Path:
    folder.mkdir()
    for place in ("/usr/bin", "/bin"):
        for program in Path(place).iterdir():
            if not program.name.startswith("java") and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    assert shutil.which("java", path=str(folder)) is None
    return folder
