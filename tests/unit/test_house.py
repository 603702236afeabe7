"""What the sources keep to, where no tool looks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"


def test_decisions_are_in_their_index() -> None:
    """The index links every decision, and nothing that is not there."""
    index = ROOT / "docs" / "decisions" / "README.md"
    links = re.findall(r"\]\(([^)#:]+)\)", index.read_text(encoding="utf-8"))
    assert [link for link in links if not (index.parent / link).is_file()] == []
    assert {page.name for page in index.parent.glob("*.md")} - {"README.md"} <= set(links)


TRANSLATED = re.compile(
    r"is no (duration|url|number|text|message|list)\b"
    r"|of no known kind|no record fits|\b(come|comes|came) again\b|\b(failed|gone) for good\b"
    r"|[Ww]hat is to be\b|at the same (order|message) meanwhile|[Ll]ongest unseen"
    r"|Nobody is here to answer|is a first one\b|let be sent what|not told of what\b"
    r"|gave a int, no text"
)
"""Phrases that readers of English as a second language stumble over."""


def test_plain_words() -> None:
    """No page, docstring, comment or message has one of the phrases that have plainer words."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    sources = [each for each in SOURCES.rglob("*") if each.suffix in (".py", ".pyi", ".lua")]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in [*pages, *sources]
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if TRANSLATED.search(line)
    ]
    assert found == []
