"""Workers: the processes that work with the ledger, and what is decided of those that are dead."""

from starlette.responses import Response

from oncely import ops
from oncely.core.errors import ConfigError, RefusedError
from oncely.core.record import Key
from oncely.web import contents
from oncely.web.decisions import WORKERS, OperatorDecision
from oncely.web.pages.confirming import Chosen, DecisionPages, Outcome, Subject, named, told
from oncely.web.pages.lists import part
from oncely.web.visit import MOST, Visit


def workers(visit: Visit) -> Response:
    """The processes that work with the ledger."""
    shown = contents.workers(visit.ledger, visit.ledger.now()) | {"decisions": WORKERS.values()}
    return part(visit, "workers", "Workers", **shown, command="oncely workers --json")


def _choose(visit: Visit) -> Chosen:
    """Those that were ticked, and are not alive."""
    names, dead = visit.sent("worker")[:MOST], dict[str, Subject]()
    for each in ops.workers(visit.ledger):
        worker = each.worker
        if worker.name in names and not each.is_alive:
            label = f"{worker.name}, {each.in_words}"
            dead[worker.name] = Subject(Key(worker.consumer, ""), worker.name, label)
    alive = [f"{name}: it is alive, or not known" for name in names if name not in dead]
    return Chosen([*dead.values()], alive)


def _end_claims(visit: Visit, _: OperatorDecision) -> Outcome:
    """End the claims of one after another."""
    done: list[tuple[str, str]] = []
    refused: list[str] = []
    audit_error: str | None = None
    for name in visit.sent("worker")[:MOST]:
        try:
            changed = ops.worker_dead(visit.ledger, name, by=visit.by, why=visit.field("why"))
        except (RefusedError, ConfigError) as error:
            # Claims of others may have ended by now: the page has to name them.
            refused.append(str(error))
        else:
            done += told(changed, named)
            refused += [each.reason for each in changed.refused]
            audit_error = audit_error or changed.audit_error
    return Outcome(done, refused, audit_error)


WORKER_PAGES = DecisionPages(
    WORKERS, "/workers/change", "/workers", "worker", _choose, _end_claims, "worker"
)
