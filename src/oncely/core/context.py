"""What is being processed now, in this thread and task: how a message reaches its claim."""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from oncely.core.errors import MessageError

if TYPE_CHECKING:
    from oncely.core.message import Message
    from oncely.core.policy import Duration
    from oncely.core.record import Claim

T = TypeVar("T")


class Processing(Protocol):
    """A message whose handler runs under a claim."""

    is_over: bool
    """Whether the handler has ended."""
    message: "Message | None"
    """What the handler was given, where that is known."""

    @property
    def claim(self) -> "Claim":
        """The right under which the handler runs."""

    @property
    def idempotency_key(self) -> str:
        """The same for every delivery of the message to this consumer: 64 hexadecimal digits."""

    def step_key(self, name: str) -> str:
        """As `idempotency_key`, and different for each step."""

    @overload
    def step(
        self, name: str, function: Callable[..., Awaitable[T]], *args: Any
    ) -> Awaitable[T]: ...
    @overload
    def step(self, name: str, function: Callable[..., T], *args: Any) -> T: ...
    def step(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` once for the message, and return its result, as JSON has it.

        A later attempt returns the kept result and does not run it. An async function is to be
        awaited. Raises FencedError where another worker took the message over, MessageError for a
        name or a result that cannot be kept; an error of the function is raised as it was.
        """

    def send(
        self,
        destination: str,
        content: "Message | bytes | str | Any",
        delay: "Duration | None" = None,
    ) -> str:
        """Send a message when the handler has succeeded; return its id.

        A Message keeps its id; anything else becomes the body of a new one, JSON where it is
        neither bytes nor text, whose id is the same in every attempt. Raises MessageError beyond
        the limit of one message, and for what cannot be sent.
        """


_current: ContextVar[Processing | None] = ContextVar("oncely_processing", default=None)


def current() -> Processing:
    """What is being processed. Raises MessageError outside a handler."""
    processing = _current.get()
    if processing is None or processing.is_over:
        raise MessageError(
            "no message is being processed here: call this inside a function under `once`, "
            "`claimed`, `idempotent_consumer`, or a consumer's handler"
        )
    return processing


class entered:  # noqa: N801 - reads as a statement.
    """While this is entered, `processing` is what is being processed in this thread and task."""

    def __init__(self, processing: Processing | None) -> None:
        self._processing = processing

    def __enter__(self) -> None:
        self._token = _current.set(self._processing)

    def __exit__(self, *_: object) -> None:
        # A generator may be closed by another task than the one that began it: what is processed
        # there is not what was entered here.
        try:  # noqa: SIM105 - cheaper than `suppress`, and this is entered for each message.
            _current.reset(self._token)
        except ValueError:
            pass
