"""What is in the wheel and in the sdist, and what they say about themselves."""

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path, PurePosixPath

import pytest
from package_tests.conftest import ROOT, Built, Install

METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
BESIDE = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
# The build backend puts it there, so that what is built from the sdist leaves out the same.
BY_HATCH = {".gitignore"}
REPOSITORY = "https://github.com/oncely/oncely/blob/v"


def tracked(folder: str) -> set[str]:
    """What the repository has below `folder`."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return set(listed.splitlines())


def contents(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        for name in sorted(opened.namelist()):
            yield name, opened.read(name)


@pytest.fixture
def metadata(built: Built) -> Message:
    """What the wheel says about itself."""
    files = dict(contents(built.wheel))
    [name] = [name for name in files if name.endswith(".dist-info/METADATA")]
    return message_from_bytes(files[name])


def test_wheel(built: Built) -> None:
    """The wheel has all that is below src, its licence, and nothing else: no test."""
    names = {name for name, _ in contents(built.wheel)}
    [info] = {name.split("/")[0] for name in names if ".dist-info/" in name}
    modules = {file.removeprefix("src/") for file in tracked("src")}
    assert names == modules | {f"{info}/{name}" for name in METADATA}
    assert {"oncely/py.typed", "oncely/__init__.pyi", "oncely/spark/log4j2.properties"} <= names


def test_sdist(built: Built) -> None:
    """The sdist has all that the wheel is made of, its licence, and nothing else."""
    with tarfile.open(built.sdist) as opened:
        names = [PurePosixPath(member.name) for member in opened if member.isfile()]
    transaction = {str(name.relative_to(name.parts[0])) for name in names}
    assert transaction == tracked("src") | BESIDE | BY_HATCH


def test_sdist_builds_the_wheel(built: Built) -> None:
    """The sdist and the sources make the same wheel, byte for byte."""
    assert dict(contents(built.wheel)) == dict(contents(built.straight))


def test_twine(built: Built) -> None:
    """Twine finds nothing to say."""
    command = [sys.executable, "-m", "twine", "check", "--strict"]
    subprocess.run([*command, str(built.wheel), str(built.sdist)], check=True)


def test_check_wheel_contents(built: Built) -> None:
    """check-wheel-contents finds nothing to say."""
    program = Path(sys.executable).with_name("check-wheel-contents")
    subprocess.run([program, built.wheel], check=True)


def test_links(metadata: Message) -> None:
    """No link of the description is relative; ours lead to the version's own files."""
    links = re.findall(r"\]\(([^)\s]+)\)", str(metadata.get_payload()))
    here = f"{REPOSITORY}{metadata['Version']}/"
    assert any(link.startswith(here) for link in links)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    files = [link.removeprefix(here).split("#")[0] for link in links if link.startswith(here)]
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_types(install: Install) -> None:
    """Mypy finds the types of the package that is installed, as a user's check does."""
    python = install([])
    command = [sys.executable, "-m", "mypy", "--config-file=", "--strict"]
    program = str(ROOT / "typing_tests")
    subprocess.run(
        [*command, "--python-executable", python, program], check=True, cwd=python.parent
    )


def test_sizes(built: Built, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither is larger than a megabyte; what they are is printed."""
    with capsys.disabled():
        for file in (built.sdist, built.wheel):
            size = file.stat().st_size
            print(f"\n{file.name}: {size / 1000:.0f} kB", end="")  # noqa: T201 - it is asked for.
            assert size < 1_000_000
