"""Whether the search of the built site finds what people type: `make docs` runs it at its end."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.search.en import SearchEnglish

WORDS = (
    *("Celery", "dead letter queue", "Delta", "Django", "effectively once"),
    *("exactly once", "exit code", "FastAPI", "GitHub", "idempotency key", "inbox", "Kafka"),
    *("Kubernetes", "MariaDB", "outbox", "PgBouncer", "poison message", "PostgreSQL", "Prometheus"),
    *("RabbitMQ", "Redis", "retry", "Spark", "SQLite", "Stripe", "webhook"),
)
"""Each is to lead to a page, which has all of its words."""
GUIDED = ("cleanup", "dedup", "lock", "timeout", "tracker", "ttl", "upgrade")
"""Each is to lead to a guide or an explanation: the API has methods with such names."""
_ENGLISH = SearchEnglish({})


def pages_of(index: dict[str, Any], word: str) -> set[int]:
    """The pages that have a word in their text or a title. The index has the stems of words."""
    found: set[int] = set()
    stem = _ENGLISH.stem(word)
    for table in ("terms", "titleterms"):
        pages = index[table].get(stem, [])
        found.update([pages] if isinstance(pages, int) else pages)
    return found


def main(site: Path) -> int:
    """Return 1 where a word leads nowhere."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    lost = []
    for words in WORDS:
        # What stands in every text, such as "at", is not in the index.
        parts = set(re.findall(r"\w+", words.lower())) - set(_ENGLISH.stopwords)
        if not set.intersection(*(pages_of(index, part) for part in parts)):
            lost.append(words)
    guides = {
        number
        for number, name in enumerate(index["docnames"])
        if name.startswith(("how-to/", "explanation/"))
    }
    lost += [f"{word} (no guide)" for word in GUIDED if not guides & pages_of(index, word)]
    if lost:
        print(f"search: no page has {', '.join(lost)}", file=sys.stderr)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
