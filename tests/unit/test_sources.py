"""Sources: queues of transports, and what other packages add by entry points."""

from contextlib import closing
from pathlib import Path

import pytest

from oncely import ConfigError, Message, open_transport
from oncely.sources import DrainableSource, open_source

PACKAGE = """
from oncely import Message, open_transport

class PigeonSource:
    def __init__(self, url, queue):
        self.messages = [Message(f"{queue} of {url}")]

    def receive(self, max_messages, wait_s):
        return self.messages

    def acknowledge(self):
        self.messages = []

    def close(self):
        pass

def open_pigeons(url):
    return open_transport("memory://pigeons")
"""
ENTRY_POINTS = """
[oncely.sources]
pigeon = pigeons:PigeonSource

[oncely.transports]
dove = pigeons:open_pigeons
"""


@pytest.fixture
def pigeons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with a source and a transport."""
    about = tmp_path / "pigeons-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeons\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "pigeons.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_queue_of_a_transport() -> None:
    """What was received and not acknowledged is received again; what was acknowledged is gone."""
    url = "memory://test_sources"
    with closing(open_transport(url)) as transport:
        transport.publish("orders", [Message("a"), Message("b")])
        transport.publish("others", [Message("c")])
    with closing(open_source(url, "orders")) as source:
        assert [message.id for message in source.receive(1, 0)] == ["a"]
        source.acknowledge()
        assert [message.id for message in source.receive(9, 0)] == ["b"]
    with closing(open_source(url, "orders")) as source:
        assert isinstance(source, DrainableSource)
        assert not source.is_drained()
        assert [message.id for message in source.receive(9, 0)] == ["b"]
        source.acknowledge()
        assert source.is_drained()
        assert source.receive(9, 0) == []


def test_a_message_that_must_not_be_handled_has_no_id() -> None:
    """Its id and the reason are headers: the policy of whoever reads it decides."""
    url = "memory://test_sources_problem"
    with closing(open_transport(url)) as transport:
        transport.publish("orders", [Message("long", b"12345", headers={"a": "b"})])
    with closing(open_source(f"{url}?max_bytes=4", "orders")) as source:
        [message] = source.receive(9, 0)
    reason = "body of 5 bytes is over the limit of 4"
    headers = {"a": "b", "oncely-id": "long", "oncely-reason": reason}
    assert message == Message("", b"12345", headers=headers)


@pytest.mark.usefixtures("pigeons")
def test_other_packages_add_sources_and_transports() -> None:
    """Each by the scheme of its URLs. A transport is a source, too; a source is not a transport."""
    assert [m.id for m in open_source("pigeon://x", "q").receive(1, 0)] == ["q of pigeon://x"]
    with closing(open_transport("dove://x")) as transport:
        transport.publish("orders", [Message("a")])
    with closing(open_source("dove://x", "orders")) as source:
        assert [message.id for message in source.receive(1, 0)] == ["a"]
    with pytest.raises(ConfigError, match=r"^transport: 'pigeon://x' .*; installed: dove://$"):
        open_transport("pigeon://x")


def test_an_unknown_scheme(pigeons: None) -> None:
    """The error is one line, and has all that is known, here and in other packages."""
    told = (
        r'^source: \'swan://u:\*\*\*@x\' is not of a known kind; write .*"amqp://.*dove://.*pigeon'
    )
    with pytest.raises(ConfigError, match=told) as raised:
        open_source("swan://u:secret@x", "q")
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="names no queues"):
        open_source("memory://", "q")
