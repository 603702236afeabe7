# mypy: disable-error-code="untyped-decorator"
"""A Celery application for its worker in another process, and for the test that sends it tasks."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from celery import Celery, Task
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker
from tests.integration.adapting import WRITE, Effects

from oncely.adapters.celery import once_task
from oncely.core.message import Message
from oncely.core.policy import Finding, Policy, at_most_once, effectively_once
from oncely.ledger.ledger import Ledger, open_ledger

URL, FOLDER, RESULTS = "ADAPTER_URL", "ADAPTER_FOLDER", "ADAPTER_RESULTS"


def ledger_in(folder: Path | str) -> Ledger:
    """The ledger of the tasks."""
    return open_ledger(f"sqlite:///{folder}/ledger.db")


def client(url: str) -> Celery:
    """An application without tasks: it sends them by name."""
    app = Celery("shop", broker=url, backend=os.environ[RESULTS], set_as_current=False)
    app.conf.update(worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)
    if url.startswith(("redis", "sqs")):
        app.conf.broker_transport_options = {"visibility_timeout": 1}
    if url.startswith("sqs"):
        own = {"queue_name_prefix": url.rpartition("/")[2], "wait_time_seconds": 1}
        app.conf.broker_transport_options |= {"region": "eu-central-1", **own}
    return app


def application(url: str, folder: Path | str) -> Celery:
    """Tasks that have an effect each, named by their argument. To be made once in a process."""
    app = client(url)
    effects = Effects(folder)

    def probe(message: Message) -> Finding:
        return "happened" if effects.count(message.id) else "not_happened"

    ledger = ledger_in(folder)
    once: Any = once_task(ledger, policy=Policy(lease="1s", on_in_doubt=probe))
    twice: Any = once_task(ledger, policy=Policy(tries=2))
    silent: Any = once_task(ledger, keep_result=False)

    @app.task(name="charge", base=once)
    def charge(name: str) -> dict[str, int]:
        return {"receipt": effects.add(name)}

    @app.task(name="note", base=silent)
    def note(name: str) -> int:
        return effects.add(name)

    @app.task(name="struggle", base=once, autoretry_for=[ValueError], default_retry_delay=0)
    def struggle(name: str, fails: int) -> int:
        times = effects.add(name)
        if times <= fails:
            raise ValueError("no such account")
        return times

    @app.task(name="give_up", base=twice, autoretry_for=[ValueError], default_retry_delay=0)
    def give_up(name: str) -> None:
        effects.add(name)
        raise ValueError("no such account")

    @app.task(name="replaced", base=once, bind=True)
    def replaced(self: Task, name: str) -> Any:
        effects.add(name)
        return self.replace(charge.s(f"{name} instead"))

    @app.task(name="die", base=once)
    def die(name: str) -> None:
        effects.add(name)
        os.kill(os.getpid(), signal.SIGKILL)

    @app.task(name="hang", base=once)
    def hang(name: str) -> None:
        effects.add(name)
        signal.pause()

    _add_keyed(app, ledger, effects)
    _add_writing(app, ledger, effects, folder)
    return app


def _add_keyed(app: Celery, ledger: Ledger, effects: Effects) -> None:
    """Tasks that are told apart by what they are called with, and one that is not ours."""
    keyed: Any = once_task(ledger, key=lambda task, name: f"{task.name} {name}")

    @app.task(name="bound", base=keyed, bind=True, autoretry_for=[OSError])
    def bound(self: Task, name: str) -> str:
        return f"{self.name} {effects.add(name)}"

    @app.task(name="mail")
    def mail(name: str) -> None:
        effects.add(name)

    held: Any = once_task(ledger, policy=replace(at_most_once(), lease="1s"))

    @app.task(name="die_once", base=held)
    def die_once(name: str) -> int:
        if (times := effects.add(name)) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return times

    unanswered: Any = once_task(
        ledger, policy=effectively_once(on_in_doubt=lambda _: "happened", backoff="10ms")
    )

    @app.task(name="lose", base=unanswered, autoretry_for=[OSError])
    def lose(name: str) -> None:
        effects.add(name)
        raise TimeoutError("no answer")

    numbered: Any = once_task(ledger, key=lambda number: number)

    @app.task(name="numbered", base=numbered, autoretry_for=[OSError])
    def number(number: int) -> int:
        return effects.add(str(number))


def _add_writing(app: Celery, ledger: Ledger, effects: Effects, folder: Path | str) -> None:
    """Tasks that write a row beside the ledger."""
    engine = create_engine(f"sqlite:///{folder}/ledger.db")
    sessions = sessionmaker(engine)
    writing: Any = once_task(ledger, transaction=sessions)
    again: Any = {"autoretry_for": [ValueError], "default_retry_delay": 0, "max_retries": 1}

    @app.task(name="write", base=writing, bind=True, **again)
    def write(self: Task, name: str, fails: int = 0, session: Session | None = None) -> str:
        effects.add(name)
        row = f"{name} {self.request.retries}"
        cast(Session, session).execute(WRITE, {"name": row})
        if self.request.retries < fails:
            raise ValueError("no such account")
        return row

    @app.task(name="hand_on", base=writing, bind=True)
    def hand_on(self: Task, name: str, session: Session) -> Any:
        session.execute(WRITE, {"name": f"{name} handed on"})
        return self.replace(app.signature("write", [name]))


if URL in os.environ:
    app = application(os.environ[URL], os.environ[FOLDER])
