"""What of pika is relied on is public, and of a version that has it."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import oncely


def test_bounded() -> None:
    """The package wants no version that may have another interface."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["rabbitmq"] == ["pika>=1.4,<2"]


def sources() -> Iterator[Path]:
    """The files that use pika."""
    for path in Path(oncely.__file__).parent.rglob("*.py"):
        if "pika" in path.read_text():
            yield path


def test_no_private_names() -> None:
    """Names of pika that begin with an underscore are nowhere: each such name is our own."""
    files = list(sources())
    assert len(files) > 5
    for path in files:
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        own = {each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.ClassDef)}
        attributes = [each for each in nodes if isinstance(each, ast.Attribute)]
        own |= {each.attr for each in attributes if isinstance(each.ctx, ast.Store)}
        own |= {
            each.target.id
            for each in nodes
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        used = {each.attr for each in attributes if is_private(each.attr)}
        # Those of named tuples are public.
        assert used <= own | {"_asdict", "_fields", "_replace"}, f"{path}: {used - own}"
        imported = [each for each in nodes if isinstance(each, ast.ImportFrom)]
        for each in imported:
            if (each.module or "").startswith("pika"):
                parts = [*(each.module or "").split("."), *(alias.name for alias in each.names)]
                assert not any(map(is_private, parts)), f"{path}: {parts}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
