"""What Sphinx makes itself: the pages of the API and of the command line."""

import importlib
import inspect
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator

import click
import pytest
from tests.docs.commands import every_command, typed
from tests.docs.pages import DOCS

from oncely.cli.options import EXAMPLE

PACKAGES = (
    *("oncely", "oncely.http", "oncely.lake", "oncely.middleware", "oncely.spark"),
    *("oncely.testing", "oncely.web"),
)
MODULES = (
    *("oncely.barrier", "oncely.metrics", "oncely.repository", "oncely.service", "oncely.sources"),
    *("oncely.tracker", "oncely.upsert"),
    *(f"oncely.adapters.{name}" for name in ("celery", "dramatiq", "faststream", "mcp", "pika")),
)
OURS = {
    "oncely.__version__",
    "oncely.metrics.harmless",
    "oncely.metrics.metrics_outage",
    *("oncely.lake", "oncely.spark"),
    "oncely.upsert.check_columns",
}
"""A module, and what others here use."""
DIRECTIVE = re.compile(r"^\.\. auto(?:class|data|exception|function):: (\S+)$", re.MULTILINE)


def public_names() -> Iterator[str]:
    for package in PACKAGES:
        yield from (f"{package}.{name}" for name in importlib.import_module(package).__all__)
    for name in MODULES:
        module = importlib.import_module(name)
        own = [
            each
            for each, value in vars(module).items()
            if not each.startswith("_")
            and (inspect.isclass(value) or inspect.isfunction(value))
            and value.__module__ == name
        ]
        yield from (f"{name}.{each}" for each in getattr(module, "__all__", own))


def test_api() -> None:
    """Every public name has its place on one page of the API, and nothing else has."""
    pages = (page.read_text() for page in (DOCS / "reference" / "api").glob("*.md"))
    places = Counter(name for page in pages for name in DIRECTIVE.findall(page))
    assert places == Counter(set(public_names()) - OURS)


def test_examples_of_commands() -> None:
    """Every command has an example, which can be typed."""
    for name, command in every_command():
        example = (command.epilog or "").partition(EXAMPLE)[2]
        [program, *words] = shlex.split(example.partition(" > ")[0])
        assert program == "oncely"
        assert typed(words).info_name == name


def test_command_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of the command line has each command as a heading, and each of its options."""
    monkeypatch.setattr(sys, "path", [str(DOCS / "_extensions"), *sys.path])
    made = "\n".join(importlib.import_module("command_pages")._lines())
    sections = {
        part.partition("\n")[0]: part for part in re.split(r"^#+ ", made, flags=re.MULTILINE)
    }
    for name, command in every_command():
        for param in command.params:
            if not getattr(param, "hidden", False):
                is_option = isinstance(param, click.Option)
                word = param.opts[0] if is_option else param.human_readable_name
                row = rf"^\| `{re.escape(word)}(?!-)\b|^\| `{re.escape(word)}`"
                found = re.findall(row, sections[name], flags=re.MULTILINE)
                assert len(found) == 1, (name, word)
    assert "[commands]" in (DOCS / "reference" / "cli.md").read_text()
