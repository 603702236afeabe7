"""What of pika is relied on: a version that has changed it fails here, and not at a user's."""

import ast
import inspect
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pika import BasicProperties, SelectConnection, channel, exceptions, frame, spec
from pika.adapters.select_connection import IOLoop
from pika.adapters.utils import nbio_interface
from pika.adapters.utils.selector_ioloop_adapter import SelectorIOServicesAdapter

import oncely
from oncely.transports.rabbitmq.properties import Encoded
from oncely.transports.rabbitmq.wire import AmqpWire

SIGNATURES: list[tuple[Any, list[str]]] = [
    (
        SelectConnection.__init__,
        [
            *("self", "parameters", "on_open_callback", "on_open_error_callback"),
            *("on_close_callback", "custom_ioloop", "internal_connection_workflow"),
        ],
    ),
    (SelectConnection.channel, ["self", "channel_number", "on_open_callback"]),
    (SelectConnection.close, ["self", "reply_code", "reply_text"]),
    (SelectConnection.add_on_connection_blocked_callback, ["self", "callback"]),
    (SelectConnection.add_on_connection_unblocked_callback, ["self", "callback"]),
    (IOLoop.add_callback, ["self", "callback"]),
    (IOLoop.add_callback_threadsafe, ["self", "callback"]),
    (IOLoop.start, ["self"]),
    (IOLoop.stop, ["self"]),
    (IOLoop.close, ["self"]),
    (SelectorIOServicesAdapter.__init__, ["self", "native_loop"]),
    (
        SelectorIOServicesAdapter.create_streaming_connection,
        ["self", "protocol_factory", "sock", "on_done", "ssl_context", "server_hostname"],
    ),
    (nbio_interface.AbstractStreamProtocol.connection_made, ["self", "transport"]),
    (nbio_interface.AbstractStreamProtocol.connection_lost, ["self", "error"]),
    (nbio_interface.AbstractStreamProtocol.eof_received, ["self"]),
    (nbio_interface.AbstractStreamProtocol.data_received, ["self", "data"]),
    (nbio_interface.AbstractStreamTransport.abort, ["self"]),
    (nbio_interface.AbstractStreamTransport.write, ["self", "data"]),
    (nbio_interface.AbstractStreamTransport.get_write_buffer_size, ["self"]),
    (frame.Method.__init__, ["self", "channel_number", "method"]),
    (channel.Channel.add_callback, ["self", "callback", "replies", "one_shot"]),
    (BasicProperties.encode, ["self"]),
]


@pytest.mark.parametrize(("function", "names"), SIGNATURES)
def test_signatures(function: Any, names: list[str]) -> None:
    """What is called, or takes another's place, takes what it is given."""
    assert list(inspect.signature(function).parameters) == names


def test_what_a_protocol_has_to_do() -> None:
    """What stands between the socket and pika's own protocol does all that is asked of one."""
    asked = nbio_interface.AbstractStreamProtocol.__abstractmethods__
    assert asked == {"connection_made", "connection_lost", "eof_received", "data_received"}


def test_frames() -> None:
    """Frames begin and end as they are taken apart."""
    heartbeat = frame.Heartbeat().marshal()
    assert heartbeat == b"\x08\0\0\0\0\0\0" + bytes([spec.FRAME_END])
    assert (spec.FRAME_METHOD, spec.FRAME_HEADER, spec.FRAME_END_SIZE) == (1, 2, 1)
    assert spec.Basic.Deliver.INDEX == 0x003C003C


def test_errors() -> None:
    """Their names and fields tell a user's mistake from a broker that is away."""
    lost = exceptions.ChannelClosedByBroker(404, "no queue")
    assert isinstance(lost, exceptions.ChannelClosed)
    assert (lost.reply_code, lost.reply_text) == (404, "no queue")
    for name in ("ProbableAuthenticationError", "ProbableAccessDeniedError"):
        assert issubclass(getattr(exceptions, name), exceptions.AMQPConnectionError)
    assert issubclass(exceptions.ConnectionWrongStateError, exceptions.AMQPError)


def test_no_name_twice() -> None:
    """What a subclass of pika's calls its own pika does not use."""
    with closing(AmqpWire()) as ours, closing(SelectorIOServicesAdapter(IOLoop())) as theirs:
        check_added(ours, theirs)
    check_added(Encoded(), BasicProperties())


def check_added(ours: object, theirs: object) -> None:
    added = vars(ours).keys() - vars(theirs).keys()
    assert added
    assert not added & {*dir(type(theirs))}


def test_bounded() -> None:
    """The package wants no version that may have another interface."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["rabbitmq"] == ["pika>=1.4,<2"]


def sources() -> Iterator[Path]:
    """The files that use pika."""
    for path in Path(oncely.__file__).parent.rglob("*.py"):
        if "pika" in path.read_text():
            yield path


def test_no_private_names() -> None:
    """Names of pika that begin with an underscore are nowhere: each such name is our own."""
    files = list(sources())
    assert len(files) > 5
    for path in files:
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        own = {each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.ClassDef)}
        attributes = [each for each in nodes if isinstance(each, ast.Attribute)]
        own |= {each.attr for each in attributes if isinstance(each.ctx, ast.Store)}
        own |= {
            each.target.id
            for each in nodes
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        used = {each.attr for each in attributes if is_private(each.attr)}
        # Those of named tuples are public.
        assert used <= own | {"_asdict", "_fields", "_replace"}, f"{path}: {used - own}"
        imported = [each for each in nodes if isinstance(each, ast.ImportFrom)]
        for each in imported:
            if (each.module or "").startswith("pika"):
                parts = [*(each.module or "").split("."), *(alias.name for alias in each.names)]
                assert not any(map(is_private, parts)), f"{path}: {parts}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
