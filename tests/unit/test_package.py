"""What pyproject.toml says of the package fits what stands elsewhere. See `make check-package`."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
SMOKE = ROOT / "package_tests" / "smoke"


def test_all() -> None:
    """The extra `all` has every other but `java`, and nothing of its own."""
    named = [re.fullmatch(r"oncely\[(.*)\]", each) for each in EXTRAS["all"]]
    transaction = {extra for each in named if each for extra in each[1].split(",")}
    assert all(named)
    assert transaction == EXTRAS.keys() - {"all", "java"}


def test_extras_are_tried() -> None:
    """Every extra has a program that shows that it is enough; `java` and `all` use the others'."""
    programs = {program.stem.removeprefix("with_") for program in SMOKE.glob("with_*.py")}
    assert programs == EXTRAS.keys() - {"all", "java"} | {"nothing"}


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_are_documented(extra: str) -> None:
    """The page of extras says what each is for."""
    table = re.findall(
        r"^\| (`.*?) \|", (ROOT / "docs/reference/extras.md").read_text(), re.MULTILINE
    )
    assert f"`{extra}`" in ", ".join(table).split(", ")


def test_citation() -> None:
    """CITATION.cff is of this version, licence and place."""
    lines = dict(
        line.split(": ", 1)
        for line in (ROOT / "CITATION.cff").read_text().splitlines()
        if re.match(r"[a-z-]+: ", line)
    )
    assert lines["version"] == PROJECT["version"]
    assert lines["license"] == PROJECT["license"]
    assert lines["repository-code"] == PROJECT["urls"]["Source"]
    assert lines["url"] == PROJECT["urls"]["Documentation"]
