"""A middleware for dramatiq whose actors handle each message once."""

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from inspect import unwrap
from typing import Any

from dramatiq import Actor, Broker, Middleware
from dramatiq.broker import MessageProxy
from dramatiq.middleware import MiddlewareError, SkipMessage

from oncely.adapters.attempt import Attempt, session_parameter
from oncely.core.durations import Duration
from oncely.core.errors import ConfigError
from oncely.core.ids import Id, id_of_key
from oncely.core.policy import Policy
from oncely.core.verdicts import Delay, SetAside
from oncely.ledger import Ledger
from oncely.lifecycle.handling import Handling
from oncely.lifecycle.turn import Asked, Turn
from oncely.lifecycle.wrapping import Run, is_async, name_of, wrapped
from oncely.once import check_source

KeyOf = Callable[[MessageProxy], Id | None]


class OnceMiddleware(Middleware):
    """For `broker.add_middleware`: every actor handles a message once.

    The consumer is the actor's name, the id dramatiq's own or what `key` gives for a message. An
    actor's option `once` is a Policy of its own, or False for an actor that is left alone. A
    duplicate has the kept result, which is JSON; with `keep_result` off it is skipped. What is
    busy, or meets a store that is away, is sent again with a delay. What is refused goes to
    dramatiq's dead letters. An error of the actor is recorded and raised as it was, so that Retries
    decides.

    With `transaction`, a SQLAlchemy Engine or sessionmaker, actors are given a connection or
    session as their last parameter, by name, in a transaction that the claim is part of: all is
    stored together, or nothing. An actor's option `once_transaction` is a source of its own, or
    False for an actor that takes none. An actor that cannot be given one raises ConfigError when it
    is declared.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        key: KeyOf | None = None,
        keep_result: bool = True,
        lease: Duration | None = None,
        policy: Policy = Policy(),
        transaction: Any = None,
    ) -> None:
        under = partial(Handling.under, ledger, lease=lease, keep_result=keep_result)
        # What is wrong is told where it is written, and not by the first message.
        under("actor", policy)
        self._ledger = ledger
        if transaction is not None:
            self._check_source(transaction)
        self._transaction = transaction
        self._under: Callable[[Actor[Any, Any]], Handling] = lambda actor: under(
            actor.actor_name, actor.options.get("once", policy)
        )
        self._key_of = key or _message_id
        self._message: ContextVar[MessageProxy | None] = ContextVar("message", default=None)

    @property
    def actor_options(self) -> set[str]:
        """What actors may be declared with."""
        return {"once", "once_transaction"}

    def before_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:  # noqa: ARG002
        """Refuse an actor that cannot be given a session."""
        try:
            self._session_of(actor)
        except ConfigError as error:
            raise _ActorError(str(error)) from None

    def after_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        """Wrap its function: the hooks around a message could not give a duplicate its result."""
        if actor.options.get("once") is not False:
            actor.fn = wrapped(actor.fn, self._once(broker, actor))

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:  # noqa: ARG002
        """Let the function know what it is called for."""
        self._message.set(message)

    def _session_of(self, actor: Actor[Any, Any]) -> tuple[Any, str] | None:
        """Where its sessions come from, and the parameter they go to; None where it takes none."""
        source = actor.options.get("once_transaction", self._transaction)
        if source in (None, False) or actor.options.get("once") is False:
            return None
        self._check_source(source)
        function = unwrap(actor.fn)
        if is_async(function):
            raise ConfigError(
                f"transaction: {name_of(function)} is async, and runs on a loop of dramatiq's; "
                "write it without async, or add once_transaction=False to the actor"
            )
        return source, session_parameter(function)

    def _check_source(self, source: object) -> None:
        check_source(source, "an actor", self._ledger, awaits=False)

    def _once(self, broker: Broker, actor: Actor[Any, Any]) -> Run:
        session = self._session_of(actor)
        # Found when it is used: what raises where an actor is declared, dramatiq only logs.
        handling_of = cache(self._under)

        def run(call: Callable[..., Any], _: Any, __: Any) -> Any:
            message = self._message.get()
            # Other actors may be called from this one: those calls are not messages.
            self._message.set(None)
            if message is None:
                return call()
            turn = Turn(Asked(id_of_key(self._key_of(message))))
            if session is None:
                return _attempted(Attempt(handling_of(actor), turn), broker, message, call)
            source, name = session
            attempt = Attempt(handling_of(actor), turn, source)
            return _attempted(attempt, broker, message, lambda given: call(**{name: given}))

        return run


class _ActorError(ConfigError, MiddlewareError):
    """What else is raised where an actor is declared, dramatiq only logs."""


def _attempted(
    attempt: Attempt, broker: Broker, message: MessageProxy, call: Callable[..., Any]
) -> Any:
    try:
        attempt.run(call)
    except Exception as error:
        match attempt.verdict(error):
            case Delay(delay_s):
                # By hand: Retries would count it.
                broker.enqueue(message, delay=int(delay_s * 1_000))  # type: ignore[arg-type]
                raise _skipped(message) from error
            case SetAside(reason):
                message.fail()
                raise SkipMessage(reason) from error
            case None:
                raise
    if not attempt.has_result:
        raise _skipped(message)
    return attempt.result


def _skipped(message: MessageProxy) -> SkipMessage:
    # Results would keep None as the result of what is skipped.
    message.options["store_results"] = False
    return SkipMessage("a duplicate, or sent again")


def _message_id(message: MessageProxy) -> str | None:
    return message.message_id
