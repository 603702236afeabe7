"""The spool, and what is taken into it from a queue: no Spark here."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from tests.conditions import wait_until
from tests.servers import free_port

from oncely import ConfigError, Message, OncelyError, open_transport
from oncely.core.errors import TransportError
from oncely.core.verdicts import Ack
from oncely.spark.rabbitmq import spooler as spooler_module
from oncely.spark.rabbitmq.source_options import read_rabbitmq_options
from oncely.spark.rabbitmq.spool import Spool, read_segment
from oncely.spark.rabbitmq.spooler import Spooler
from oncely.testing.crashes import killed_at
from oncely.transports.transport import Delivery

_QUEUE = "orders"


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    """A spool in a folder that is not there yet."""
    with closing(Spool(str(tmp_path / "deep" / "spool"))) as spool:
        spool.open(_QUEUE)
        yield spool


def rows_of(spool: Spool, *numbers: int) -> list[dict[str, Any]]:
    """What is in these segments; in all of them without a number."""
    files = spool.files(numbers or spool.numbers())
    return [row for file in files for batch in read_segment(file) for row in batch.to_pylist()]


def ids_of(spool: Spool, *numbers: int) -> list[str]:
    return [row["id"] for row in rows_of(spool, *numbers)]


def take_until(spooler: Spooler, holds: Callable[[], bool]) -> None:
    wait_until(lambda: holds() or spooler.take(1_000) is None)


# ---- The spool ---------------------------------------------------------------------------------


def test_messages_come_out_as_they_went_in(spool: Spool) -> None:
    """Every part of a message that the sink takes is kept, and what is not a message is a row."""
    at = datetime(2025, 3, 1, 12, 30, 0, 123456, timezone(timedelta(hours=2)))
    never = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))
    whole = Message("é", b"\xff\0", "order.made", {"a": "ü", "": ""}, "shop", at, key="k")
    number = spool.write([whole, Message("", b"x" * 100), Message("n" * 300, time=never)])
    [first, second, third] = rows_of(spool, number)
    assert first == {
        "id": "é",
        "type": "order.made",
        "body": b"\xff\0",
        "headers": [("a", "ü"), ("", "")],
        "source": "shop",
        "time": at.astimezone(UTC),
        "key": "k",
    }
    assert (second["id"], second["body"], second["type"]) == (None, b"x" * 100, None)
    assert (third["id"], third["time"], third["headers"]) == ("n" * 300, None, [])


def test_no_number_is_given_twice(spool: Spool, tmp_path: Path) -> None:
    """Numbers go on after removals, in another process, and above what a checkpoint has."""
    assert [spool.write([Message(str(n))]) for n in range(4)] == [1, 2, 3, 4]
    spool.remove(4, keep=0)
    assert spool.numbers() == [4]
    spool.close()
    spool.open(_QUEUE)
    assert spool.write([Message("a")]) == 5
    assert spool.write([Message("b")], after=9) == 10


def test_a_batch_has_as_many_segments_as_fit(spool: Spool) -> None:
    """As many as hold no more than the limit; one at least, and none where there is none."""
    for size in (2, 3, 9, 1):
        spool.write([Message(str(n)) for n in range(size)])
    assert [spool.end_of_next(start, 5) for start in range(5)] == [2, 2, 3, 4, 4]
    assert spool.end_of_next(0, 100) == 4


def test_a_missing_segment_is_never_passed_over(spool: Spool, tmp_path: Path) -> None:
    """What is asked for and gone is an error that says so, on the driver and on an executor."""
    for n in range(3):
        spool.write([Message(str(n))])
    [_, file, _] = spool.files([1, 2, 3])
    Path(file).unlink()
    with pytest.raises(OncelyError, match=r"segment 2 is not in '.*spool'.*new checkpoint"):
        spool.files([1, 2, 3])
    with pytest.raises(OncelyError, match=r"cannot be read here: .*all machines share"):
        list(read_segment(file))


def test_a_spool_has_one_owner_and_one_queue(spool: Spool, tmp_path: Path) -> None:
    """A second process is turned away while the first is there, another queue for good."""
    folder = str(tmp_path / "deep" / "spool")
    with pytest.raises(ConfigError, match=r"option spool: .* in use by another query"):
        Spool(folder).open(_QUEUE, wait_s=0.1)
    spool.close()
    with pytest.raises(ConfigError, match=r"holds messages of queue 'orders', not 'payments'"):
        Spool(folder).open("payments", wait_s=0.1)
    with closing(Spool(folder)) as another:
        another.open(_QUEUE)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """It is said in one line."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"option spool: '.*file/spool' cannot be made: "):
        Spool(str(tmp_path / "file" / "spool")).open(_QUEUE)


# ---- From the queue into the spool -------------------------------------------------------------

Open = Callable[..., Spooler]


@pytest.fixture
def open_at(tmp_path: Path) -> Iterator[Open]:
    """Opens spoolers, and closes them all in the end."""
    with ExitStack() as opened:

        def open_spooler(url: str, **options: str) -> Spooler:
            told = {"url": url, "queue": _QUEUE, "spool": str(tmp_path / "spool"), **options}
            spooler = opened.enter_context(closing(Spooler(read_rabbitmq_options(told))))
            spooler.open()
            return spooler

        yield open_spooler


def publish(url: str, ids: list[str]) -> None:
    with closing(open_transport(url)) as transport:
        transport.publish(_QUEUE, [Message(id_) for id_ in ids])


def left_in_queue(url: str) -> list[str]:
    with closing(open_transport(url)) as transport:
        deliveries: list[Delivery] = []
        while not transport.is_drained(_QUEUE):
            more = transport.receive(_QUEUE, 1_000, 0.1)
            transport.acknowledge([(delivery, Ack()) for delivery in more])
            deliveries += more
    return [delivery.message.id for delivery in deliveries]


def test_prefetch_fills_a_segment(rabbitmq_url: str, open_at: Open) -> None:
    """The bodies of a segment are in memory together: what the broker may send at once ends it."""
    publish(rabbitmq_url, ["a", "b", "c", "d"])
    spooler = open_at(f"{rabbitmq_url}?prefetch=2", wait="10s")
    sizes = [0]
    while sum(sizes) < 4:
        sizes.append(spooler.take(100)[1])
    assert max(sizes) <= 2


def test_what_cannot_be_written_is_not_acknowledged(rabbitmq_url: str, open_at: Open) -> None:
    """Where the spool takes nothing, the queue keeps all of it."""
    publish(rabbitmq_url, ["a", "b"])
    spooler = open_at(rabbitmq_url, wait="10s")
    shutil.rmtree(Path(spooler.spool.file(1)).parent)
    with pytest.raises(OncelyError, match=r"spool: '.*' cannot be written: "):
        spooler.take(10)
    spooler.close()
    assert left_in_queue(rabbitmq_url) == ["a", "b"]


@pytest.mark.parametrize(
    ("point", "spooled", "queued"),
    [
        ("segment_written", False, True),
        ("segment_stored", True, True),
        ("segment_acknowledged", True, False),
    ],
)
def test_killed_between_the_queue_and_the_offset(
    rabbitmq_url: str,
    open_at: Open,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    spooled: bool,
    queued: bool,
) -> None:
    """Every message is in the spool or in the queue; what is in both comes again."""
    # However long the broker pauses.
    monkeypatch.setattr(spooler_module, "_QUIET_S", 10.0)
    ids = [f"m{n}" for n in range(200)]
    publish(rabbitmq_url, ids)

    def work() -> None:
        open_at(rabbitmq_url, wait="10s").take(len(ids))

    assert killed_at(point, work)
    spooler = open_at(rabbitmq_url, wait="1s")
    assert list(spooler.spool.file(1).parent.glob(".segment*")) == []
    assert ids_of(spooler.spool) == (ids if spooled else [])
    before = len(spooler.spool.numbers())
    if queued:
        take_until(spooler, lambda: len(ids_of(spooler.spool)) >= (before + 1) * len(ids))
    assert ids_of(spooler.spool) == ids * (before + queued)
    spooler.close()
    assert left_in_queue(rabbitmq_url) == []


def test_all_that_is_there_and_not_what_comes_later(rabbitmq_url: str, open_at: Open) -> None:
    """`take_all` ends though more is published all the time."""
    publish(rabbitmq_url, [str(n) for n in range(250)])
    spooler = open_at(rabbitmq_url, max_messages_per_batch="100")
    take = spooler.take

    def take_and_publish(limit: int, after: int = 0, **more: bool) -> tuple[int, int]:
        publish(rabbitmq_url, ["later"] * limit)
        return take(limit, after, **more)

    spooler.take = take_and_publish  # type: ignore[method-assign]
    assert spooler.take_all() == 3
    assert ids_of(spooler.spool) == [str(n) for n in range(250)]


def test_what_the_broker_has_told_of_is_waited_for(rabbitmq_url: str, open_at: Open) -> None:
    """A connection that is slow to bring it does not pass for an empty queue."""
    publish(rabbitmq_url, ["a", "b"])
    spooler = open_at(rabbitmq_url, wait="1s")
    receive = spooler._transport.receive

    def receive_slowly(queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        return receive(queue, max_messages, wait_s) if wait_s > 5 else []

    spooler._transport.receive = receive_slowly  # type: ignore[method-assign]
    assert spooler.take_all() == 1
    assert ids_of(spooler.spool) == ["a", "b"]


def test_a_broker_that_never_was() -> None:
    """Nobody waits for it: that is an error at once."""
    url = f"amqp://guest:guest@127.0.0.1:{free_port()}/"
    spooler = Spooler(read_rabbitmq_options({"url": url, "queue": "x", "spool": "x"}))
    with closing(spooler), pytest.raises(TransportError):
        spooler.take(1)


# ---- Options -----------------------------------------------------------------------------------

_GOOD = {"url": "amqp://localhost", "queue": "orders", "spool": "spool"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": ""}, r"option url: missing; write \.option\(\"url\", \"amqp://"),
        ({"url": "http://u:secret@h"}, r"option url: 'http://u:\*\*\*@h' is not a URL of RabbitMQ"),
        ({"url": "sqlite:///q.db"}, r"is not a URL of RabbitMQ; write \"amqp://user:password@"),
        ({"url": "env:ONCELY_NOT_SET"}, r"environment variable ONCELY_NOT_SET is not set"),
        ({"url": "amqp://h?prefetch=x"}, "prefetch: 'x' is not a whole number"),
        ({"queue": ""}, "option queue: missing"),
        ({"spool": ""}, "option spool: missing"),
        ({"spool": "s3://bucket/x"}, "option spool: 's3://bucket/x' is not a folder"),
        ({"quue": "orders"}, "option quue: there is no such key; did you mean 'queue'?"),
        ({"max_messages_per_batch": "0"}, "max_messages_per_batch: '0' is not a whole number"),
        ({"keep_segments": "few"}, "keep_segments: 'few' is not a whole number"),
        ({"wait": "0s"}, 'option wait: zero would ask the broker without a pause; write "1s"'),
        ({"wait": "soon"}, "option wait: 'soon' is not a duration"),
    ],
)
def test_mistakes_are_told_in_one_line(given: dict[str, str], said: str) -> None:
    """Each names its option, and what to write."""
    with pytest.raises(ConfigError, match=said) as raised:
        read_rabbitmq_options(_GOOD | given)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_secret_is_read_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The URL stays where it is, and no error shows it."""
    monkeypatch.setenv("BROKER", "amqp://user:secret@localhost")
    options = read_rabbitmq_options(_GOOD | {"url": "env:BROKER", "spark.sql.x": "y"})
    assert "secret" not in repr(options)
    assert options.url() == "amqp://user:secret@localhost"
    monkeypatch.setenv("BROKER", "amqp://user:secret@localhost?prefix=x")
    with pytest.raises(ConfigError, match="prefix") as raised:
        options.transport()
    assert "secret" not in str(raised.value)
