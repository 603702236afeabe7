"""What all lists have: the consumer that is asked for, and the command that prints the same."""

import shlex

from oncely.web.contents import LIMIT
from oncely.web.visit import MOST, Visit


def command(words: str, visit: Visit) -> str:
    """The command line that prints what the list shows."""
    consumer = visit.consumer
    own = "" if consumer is None else f" --consumer {shlex.quote(consumer)}"
    limit = "" if visit.limit == LIMIT else f" --limit {visit.limit}"
    return f"oncely {words}{own}{limit} --json"


def more_of(visit: Visit, more: bool) -> str | None:
    """The address of the same list with more rows; None where there are no more to show."""
    return visit.here(limit=min(10 * visit.limit, MOST)) if more and visit.limit < MOST else None
