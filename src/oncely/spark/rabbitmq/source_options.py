"""The options of the source "oncely-rabbitmq", from strings, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from oncely.core.durations import positive_seconds
from oncely.core.errors import ConfigError, mask_passwords
from oncely.locations import absolute_location, hidden, read_secret
from oncely.spark.option_values import refuse_unknown, required, whole_number
from oncely.transports.open_transport import open_transport
from oncely.transports.transport import Transport

FORMAT = "oncely-rabbitmq"

_NAMES = ("keep_segments", "max_messages_per_batch", "queue", "spool", "url", "wait")
_EXAMPLE = "amqp://user:password@host:5672/vhost"
_MAX_MESSAGES = 10_000
# The number of batches in a Spark checkpoint by default.
_KEEP_SEGMENTS = 100


@dataclass(frozen=True)
class RabbitmqOptions:
    """The checked options of `format("oncely-rabbitmq")`. They stay on the driver."""

    location: str = field(repr=False)
    """The broker's URL, or env:NAME or file:PATH, which is read when the URL is needed."""
    queue: str
    spool: str
    max_messages: int
    """The most messages in one batch."""
    wait_s: float
    """Seconds to wait for a first message, and then for a full batch."""
    keep_segments: int
    """How many committed segments stay in the spool."""

    def url(self) -> str:
        """The broker's URL. Raises ConfigError, without showing a secret's value."""
        url = read_secret(self.location, "option url")
        if not url.startswith(("amqp://", "amqps://")):
            shown = mask_passwords(self.location)
            raise ConfigError(f'option url: {shown!r} is not a URL of RabbitMQ; write "{_EXAMPLE}"')
        return url

    def transport(self) -> Transport:
        """The transport, not connected yet. Raises ConfigError for a wrong URL."""
        url = self.url()
        with hidden(url, mask_passwords(self.location)):
            return open_transport(url)


def read_rabbitmq_options(options: Mapping[str, str]) -> RabbitmqOptions:
    """Check the options of the source. Raises ConfigError, which names the option."""
    given = {name.lower(): value for name, value in options.items()}
    refuse_unknown(given, _NAMES, passed_over=())
    location = absolute_location(required(given, "url", _EXAMPLE))
    queue, spool = required(given, "queue", "orders"), required(given, "spool", "/var/spool/orders")
    if "://" in spool:
        raise ConfigError(f"option spool: {spool!r} is not a folder that this machine has mounted")
    read = RabbitmqOptions(
        location=location,
        queue=queue,
        spool=str(Path(spool).absolute()),
        max_messages=whole_number(given, "max_messages_per_batch", _MAX_MESSAGES),
        wait_s=positive_seconds(
            given.get("wait", "1s"), "option wait", 'ask the broker without a pause; write "1s"'
        ),
        keep_segments=whole_number(given, "keep_segments", _KEEP_SEGMENTS),
    )
    read.transport()
    return read


def beside(options: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The options of a pipeline file: relative paths are relative to its folder."""
    located = dict(options)
    if "spool" in located:
        located["spool"] = str(folder / located["spool"])
    if "url" in located:
        located["url"] = absolute_location(located["url"], folder)
    return located
