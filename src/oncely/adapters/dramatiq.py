"""A middleware for dramatiq: actors handle each message once."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache, partial
from inspect import unwrap
from typing import Any

from dramatiq import Actor, Broker, Middleware, Worker
from dramatiq import Message as BrokerMessage
from dramatiq.broker import MessageProxy
from dramatiq.middleware import GroupCallbacks, MiddlewareError, SkipMessage
from dramatiq.results import Results

from oncely.adapters.attempt import Attempt, StartError, check_ledger, session_parameter
from oncely.adapters.resender import Resender
from oncely.core.durations import Duration
from oncely.core.errors import ConfigError
from oncely.core.ids import Id, id_of_key
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.turn import Turn
from oncely.core.verdicts import DeadLetter, Delay
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.results import KeepResult
from oncely.lifecycle.wrapping import Run, is_async, name_of, wrapped
from oncely.once import check_source

KeyOf = Callable[[MessageProxy], Id | None]


class OnceMiddleware(Middleware):
    """For `broker.add_middleware`: every actor handles a message once.

    The consumer is the actor's name, the id is dramatiq's own or the result of `key` for a
    message. An actor's option `once` is a Policy of its own, or False to leave the actor unchanged.
    A duplicate is skipped: its result, where results are kept, is stored again, and nothing follows
    it, neither callbacks nor the rest of a pipeline. A message that is busy, or whose store is
    unavailable, is enqueued again with a delay. A worker does not start on a ledger that was not
    migrated. A refused message goes to dramatiq's dead letters. An error of the actor is recorded
    and raised unchanged, so that Retries decides. What goes to dramatiq's dead letters is a dead
    letter of the ledger, too, where that is in SQL: when people retry it, a worker sends it again.

    With `transaction`, a SQLAlchemy Engine or sessionmaker, actors get a connection or session as
    their last parameter, by name. Their writes and the claim are one transaction: all of it is
    stored, or nothing. An actor's option `once_transaction` is a source of its own, or False for
    an actor that takes no session. An actor without such a parameter raises ConfigError when it is
    declared.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        key: KeyOf | None = None,
        keep_result: KeepResult = True,
        lease: Duration | None = None,
        policy: Policy = Policy(),
        transaction: Any = None,
    ) -> None:
        under = partial(Lifecycle.under, ledger, lease=lease, keep_result=keep_result)
        # Wrong options are reported here, not by the first message.
        under("actor", policy)
        self._ledger = ledger
        if transaction is not None:
            self._check_source(transaction)
        self._transaction = transaction
        self._under: Callable[[Actor[Any, Any]], Lifecycle] = lambda actor: under(
            actor.actor_name, actor.options.get("once", policy)
        )
        self._key_of = key
        self._message: ContextVar[MessageProxy | None] = ContextVar("message", default=None)

    @property
    def actor_options(self) -> set[str]:
        """The options with which actors may be declared."""
        return {"once", "once_transaction"}

    def before_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:  # noqa: ARG002
        """Refuse an actor that cannot take a session, or whose results cannot be kept."""
        try:
            self._session_of(actor)
            if actor.options.get("once") is not False:
                self._under(actor).serializer_of(actor.fn)
        except ConfigError as error:
            raise _ActorError(str(error)) from None

    def after_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        """Wrap its function: the hooks around a message could not give a duplicate its result."""
        if actor.options.get("once") is not False:
            actor.fn = wrapped(actor.fn, self._once(broker, actor))

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:  # noqa: ARG002
        """Tell the wrapped function which message it is called for."""
        self._message.set(message)

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:  # noqa: ARG002
        """Look at the ledger."""
        try:
            check_ledger(self._ledger)
        except StartError as error:
            raise _WorkerError(str(error)) from None

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:  # noqa: ARG002
        """Send what people retry to the broker."""

        def send(message: Message) -> None:
            found: BrokerMessage[Any] = BrokerMessage.decode(message.body)
            broker.enqueue(found.copy(options={"retries": 0}))

        actors = (broker.get_actor(name) for name in broker.get_declared_actors())
        ours = {each.actor_name for each in actors if each.options.get("once") is not False}
        self._resender = Resender(self._ledger, "dramatiq", ours, send)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:  # noqa: ARG002
        """Send nothing more."""
        self._resender.close()

    def before_nack(self, broker: Broker, message: MessageProxy) -> None:  # noqa: ARG002
        """Keep what dramatiq has given up."""
        if (failed := vars(message).get(_FAILED)) is not None:
            attempt, error = failed
            attempt.keep_dead(Message("", message.encode(), message.actor_name), error)

    def before_ack(self, broker: Broker, message: MessageProxy) -> None:  # noqa: ARG002
        """What follows the message is sent."""
        if (attempt := vars(message).get(_ATTEMPT)) is not None:
            attempt.finish()

    def _session_of(self, actor: Actor[Any, Any]) -> tuple[Any, Sequence[str]]:
        """The source of the actor's sessions, and their parameter; neither if it takes none."""
        source = actor.options.get("once_transaction", self._transaction)
        if source in (None, False) or actor.options.get("once") is False:
            return None, ()
        self._check_source(source)
        function = unwrap(actor.fn)
        if is_async(function):
            raise ConfigError(
                f"transaction: {name_of(function)} is async, and runs on a loop of dramatiq's; "
                "write it without async, or add once_transaction=False to the actor"
            )
        return source, [session_parameter(function)]

    def _check_source(self, source: object) -> None:
        check_source(source, "an actor", self._ledger, awaits=False)

    def _once(self, broker: Broker, actor: Actor[Any, Any]) -> Run:
        source, names = self._session_of(actor)
        # Made at the first use: dramatiq only logs errors raised when an actor is declared.
        lifecycle_of = cache(self._under)
        serializer_of = cache(lambda actor: lifecycle_of(actor).serializer_of(unwrap(actor.fn)))

        def run(call: Callable[..., Any], _: Any, __: Any) -> Any:
            message = self._message.get()
            # The actor may call others as functions: those calls are not messages.
            self._message.set(None)
            if message is None:
                return call()
            turn = Turn(id_of_key(message.message_id))
            if self._key_of is not None:
                turn.message_id = id_of_key(self._key_of(message))
                turn.metadata = {"message_id": message.message_id}
            turn.serializer = serializer_of(actor)
            options = {**actor.options, **message.options}
            is_followed = any(map(options.get, _FOLLOWED))
            attempt = Attempt(
                "dramatiq", lifecycle_of(actor), turn, source, is_followed=is_followed
            )

            def given(*sessions: Any) -> Any:
                return call(**dict(zip(names, sessions, strict=True)))

            result = _attempted(attempt, broker, message, given)
            vars(message)[_ATTEMPT] = attempt
            return result

        return run


_FOLLOWED = ("on_success", "pipe_target", "group_completion_callbacks")
"""Options by which dramatiq sends another message after one."""
_ATTEMPT, _FAILED = "oncely_attempt", "oncely_failed"
"""A message's attributes: the attempt that has succeeded, and the one that has failed, with why."""


class _WorkerError(StartError, MiddlewareError):
    """A StartError that dramatiq raises when a worker starts, and does not only log."""


class _ActorError(ConfigError, MiddlewareError):
    """A ConfigError that dramatiq raises when an actor is declared, and does not only log."""


def _attempted(
    attempt: Attempt, broker: Broker, message: MessageProxy, call: Callable[..., Any]
) -> Any:
    try:
        attempt.run(call)
    except Exception as error:
        vars(message)[_FAILED] = attempt, error
        match attempt.verdict(error):
            case Delay(delay_s):
                # Not by Retries, which would count it.
                broker.enqueue(message, delay=int(delay_s * 1_000))  # type: ignore[arg-type]
                raise _skipped(message) from error
            case DeadLetter(reason):
                message.fail()
                raise SkipMessage(reason) from error
            case None:
                raise
    if attempt.is_repeated and attempt.has_result:
        _end_repeated(attempt, broker, message)
    if attempt.is_repeated or not attempt.has_result:
        raise _skipped(message)
    return attempt.result


def _end_repeated(attempt: Attempt, broker: Broker, message: MessageProxy) -> None:
    """Store a duplicate's result. Its group counts it, unless that has counted it before: another
    message with the same key has a group of its own.
    """
    kinds = Results if attempt.is_same else (Results, GroupCallbacks)
    told: list[Any] = [each for each in broker.middleware if isinstance(each, kinds)]
    for middleware in told:
        middleware.after_process_message(broker, message, result=attempt.result)


def _skipped(message: MessageProxy) -> SkipMessage:
    # Results would store None as the result of a skipped message.
    message.options["store_results"] = False
    return SkipMessage("a duplicate, or sent again")
