"""A base class for Celery tasks that run once for each task id."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from inspect import getattr_static, signature
from typing import Any, ClassVar

from celery import Celery, Signature, Task
from celery.bootsteps import StartStopStep
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_failure, task_success, worker_process_shutdown
from celery.states import SUCCESS
from kombu.serialization import dumps, loads

from oncely.adapters.attempt import Attempt, check_ledger, session_parameter
from oncely.adapters.resender import Resender
from oncely.core.durations import Duration
from oncely.core.errors import ConfigError
from oncely.core.ids import Id, id_of_key
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.turn import Turn, leaves_doubt
from oncely.core.verdicts import Delay
from oncely.ledger.ledger import Ledger
from oncely.ledger.recorder import end_all
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.results import KeepResult, Serializer
from oncely.lifecycle.wrapping import ended, is_async, name_of
from oncely.once import check_source

KeyOf = Callable[..., Id | None]


def once_task(
    ledger: Ledger,
    consumer: str | None = None,
    *,
    key: KeyOf | None = None,
    keep_result: KeepResult = True,
    lease: Duration | None = None,
    policy: Policy = Policy(),
    transaction: Any = None,
) -> type[Task]:
    """For `@app.task(base=once_task(ledger))`: the task runs once for each task id.

    `key` replaces the task id: it is called with the arguments of the task's function, with
    `bind=True` the task first. The consumer is by default the task's name. Tasks are acknowledged
    late, and redelivered when their worker is lost, unless the task sets other options. A
    duplicate has the kept result, and neither callbacks (`link`) nor the rest of a chain follow it
    again; with `keep_result` off it is ignored. A task that is busy, or whose store is unavailable,
    runs again later, and that does not count as a retry of Celery. A worker does not start on a
    ledger that was not migrated. A refused task fails with an error that says why, which
    `autoretry_for` does not see. An error of the task, also Celery's Retry, is recorded and raised
    unchanged. A task that a worker has failed is a dead letter, where the ledger is in SQL: when
    people retry it, a worker sends it again.

    With `transaction`, a SQLAlchemy Engine or sessionmaker, the task's function gets a connection
    or session as its last parameter, by name. Its writes and the claim are one transaction: all of
    it is stored, or nothing. Senders leave that parameter out. A function without such a parameter
    raises ConfigError when its task is created.
    """
    lifecycle = Lifecycle.under(ledger, consumer or "task", policy, lease, keep_result=keep_result)
    if transaction is not None:
        check_source(transaction, "a Celery task", ledger, awaits=False)
    key_of = None if key is None else staticmethod(key)
    fields = {"abstract": True, "like": lifecycle, "consumer": consumer, "key_of": key_of}
    fields["source"] = transaction
    return type("OnceTask", (OnceTask,), fields)


class OnceTask(Task):  # type: ignore[misc]  # It has no types.
    """A task that runs once for each id; see `once_task`."""

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    like: ClassVar[Lifecycle]
    consumer: ClassVar[str | None]
    key_of: ClassVar[KeyOf | None]
    source: ClassVar[Any] = None
    keeps: ClassVar[Serializer]
    """What keeps its results; Celery's `serializer` is for its messages."""
    session_names: ClassVar[Sequence[str]] = ()
    """The parameter that gets the session, if there is one."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "run" in vars(cls):
            cls.keeps = cls.like.serializer_of(cls.run)
            if cls.source is not None:
                _take_session(cls)

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Let workers of the application look at the ledger when they start."""
        app.steps["worker"].add(_LedgerStep)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task: once if a worker calls it, and each time if other code does."""
        if self.request.called_directly or self.request.get("is_claimed"):
            return super().__call__(*args, **kwargs)
        request = self.request
        request.is_claimed = True
        turn = Turn(self._message_id(args, kwargs))
        if self.key_of is not None:
            turn.metadata = {"task_id": request.id}
        turn.serializer = self.keeps
        is_followed = bool(request.callbacks or request.chain or request.chord)
        attempt = Attempt("celery", self._lifecycle, turn, self.source, is_followed=is_followed)
        request.attempt = attempt
        try:
            ignored = self._attempt(attempt, args, kwargs)
        except Exception as error:
            verdict = attempt.verdict(error)
            if isinstance(verdict, Delay) and not self.request.is_eager:
                raise self._again(verdict.delay_s, error) from error
            raise
        if ignored is not None:
            attempt.finish()
            raise ignored
        if attempt.is_repeated:
            self._end_repeated(attempt)
        return attempt.result

    def _end_repeated(self, attempt: Attempt) -> None:
        """Let nothing follow a duplicate. Its chord counts it, unless that has counted it before:
        another task with the same key has a chord of its own. Raises Ignore in a worker, so that
        Celery sees no success.
        """
        request = self.request
        request.callbacks = request.chain = None
        if attempt.is_same:
            request.chord = None
        if not request.is_eager:
            keeps, result = not self.ignore_result, attempt.result
            self.backend.mark_as_done(request.id, result, request, store_result=keeps)
            # Celery calls it for no task that is ignored; celery-once frees its key there.
            self.after_return(
                SUCCESS, attempt.result, request.id, request.args, request.kwargs, None
            )
            raise Ignore("a duplicate")

    @cached_property
    def _lifecycle(self) -> Lifecycle:
        return replace(self.like, consumer=self.consumer or self.name)

    def _message_id(self, args: Any, kwargs: Any) -> str | None:
        if self.key_of is None:
            return id_of_key(self.request.id)
        return id_of_key(self.key_of(*([self] if _is_bound(type(self)) else []), *args, **kwargs))

    def _attempt(self, attempt: Attempt, args: Any, kwargs: Any) -> Ignore | None:
        """Run the task, if it is new; return Ignore if Celery must not change its state."""
        ignored: list[Ignore] = []

        def call(*sessions: Any) -> Any:
            ignored.clear()
            given = dict(zip(self.session_names, sessions, strict=True))
            try:
                return ended(self.run, *args, **kwargs, **given)
            except Ignore as raised:
                # The task has set its state itself, or has replaced itself by another task.
                ignored.append(raised)
                return _IGNORED
            except Retry as again:
                if again.exc is None or not leaves_doubt(self._lifecycle.policy, again.exc):
                    raise
                raise again.exc from None  # Celery's retry meets the record in doubt.

        attempt.run(call)
        if ignored:
            return ignored[0]
        is_done = attempt.has_result and attempt.result != _IGNORED
        return None if is_done else Ignore("a duplicate")

    def _again(self, delay_s: float, error: Exception) -> Retry | Reject:
        """Run the task again later. Celery's own `retry` would count a retry."""
        request = self.request
        signature = self.signature_from_request(request, countdown=delay_s, retries=request.retries)
        try:
            signature.apply_async()
        except Exception as unsent:  # noqa: BLE001 - a broker's client may raise anything.
            return Reject(unsent, requeue=True)
        return Retry(exc=error, when=delay_s, sig=signature)


_IGNORED = {"oncely:ignored": True}
"""Kept as the result of a task whose state Celery must not change, nor that of its duplicates."""


def _finish(sender: Task, **_: Any) -> None:
    # After the callbacks and the chord. A hook of the task could be replaced by a user's.
    if (attempt := sender.request.get("attempt")) is not None:
        attempt.finish()


def _keep_dead(sender: Task, exception: BaseException, **_: Any) -> None:
    request = sender.request
    if (attempt := request.get("attempt")) is not None and not request.is_eager:
        # As it was sent; but its time may be over by then, and a chord has counted the failure.
        again = {"retries": 0, "expires": None, "chord": None}
        sent = sender.signature_from_request(request, **again)
        _, _, text = dumps(sent, "json")  # type: ignore[no-untyped-call]  # It has no types.
        attempt.keep_dead(Message("", bytes(text, "utf-8"), sender.name), exception)


task_success.connect(_finish)
task_failure.connect(_keep_dead)
# A process of a worker's pool ends without what is registered to be called at its exit.
worker_process_shutdown.connect(end_all)


class _LedgerStep(StartStopStep):  # type: ignore[misc]  # It has no types.
    """Ends a worker at its start whose tasks have a ledger that cannot be used, and sends again
    the dead letters of its tasks that people retry.
    """

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **_: Any) -> None:
        self._consumers: dict[Ledger, set[str]] = {}
        self._resenders: list[Resender] = []
        for task in worker.app.tasks.values():
            if isinstance(task, OnceTask):
                consumers = self._consumers.setdefault(task.like.ledger, set())
                consumers.add(task._lifecycle.consumer)
        for ledger in self._consumers:
            check_ledger(ledger)

    def start(self, worker: Any) -> None:
        def send(message: Message) -> None:
            found = loads(message.body, "application/json", "utf-8")  # type: ignore[no-untyped-call]
            Signature.from_dict(found, worker.app).apply_async()

        for ledger, consumers in self._consumers.items():
            self._resenders.append(Resender(ledger, "celery", consumers, send))

    def stop(self, _: Any) -> None:
        for resender in self._resenders:
            resender.close()


def _is_bound(task: type[OnceTask]) -> bool:
    # Looked up in the class, where Celery has put it: `autoretry_for` replaces it in the instance.
    return not isinstance(getattr_static(task, "run"), staticmethod)


def _take_session(task: type[OnceTask]) -> None:
    """Let senders leave out the last parameter. Raises ConfigError if there is none."""
    function: Callable[..., Any] = task.run
    if is_async(function):
        raise ConfigError(
            f"transaction: {name_of(function)} is async, and Celery awaits nothing; "
            "write it without async"
        )
    whole = signature(function)
    first = list(whole.parameters)[:1] if _is_bound(task) else []
    task.session_names = [session_parameter(function, but=first)]
    left_out = {*first, *task.session_names}
    sent = whole.replace(
        parameters=[p for p in whole.parameters.values() if p.name not in left_out]
    )
    # Celery checks the arguments by it before a task is sent.
    task.__header__ = staticmethod(sent.bind)
