"""Sources: queues of transports, and what other packages add by entry points."""

from contextlib import closing
from pathlib import Path

import pytest

from oncely import ConfigError, Message, open_transport
from oncely.sources import open_source

PACKAGE = """
from oncely import Message, open_transport

class Pigeons:
    def __init__(self, url, queue):
        self.told = f"{queue} of {url}"

    def receive(self, max_messages, wait_s):
        return [Message(self.told)]

def open_doves(url):
    return open_transport("memory://doves")
"""
ENTRY_POINTS = (
    "[oncely.sources]\npigeon=birds:Pigeons\n[oncely.transports]\ndove=birds:open_doves\n"
)


def test_a_queue_of_a_transport() -> None:
    """What was acknowledged is gone, what was not is received again. A message that must not be
    handled has no id: that and the reason are headers.
    """
    url = "memory://test_sources"
    with closing(open_transport(url)) as transport:
        transport.publish("orders", [Message("a"), Message("b", b"12345", headers={"x": "y"})])
        transport.publish("others", [Message("c")])
    with closing(open_source(url, "orders")) as source:
        assert [message.id for message in source.receive(1, 0)] == ["a"]
        source.acknowledge()
        assert [message.id for message in source.receive(9, 0)] == ["b"]
    with closing(open_source(f"{url}?max_bytes=4", "orders")) as source:
        reason = "body of 5 bytes is over the limit of 4"
        headers = {"x": "y", "oncely-id": "b", "oncely-reason": reason}
        assert source.receive(9, 0) == [Message("", b"12345", headers=headers)]


def test_other_packages_add_sources_and_transports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by the scheme of its URLs; a transport is a source, too. The error about another scheme
    is one line, with all that is known.
    """
    about = tmp_path / "birds-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: birds\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "birds.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    assert open_source("pigeon://x", "q").receive(1, 0) == [Message("q of pigeon://x")]
    with closing(open_transport("dove://x")) as transport:
        transport.publish("orders", [Message("a")])
    with closing(open_source("dove://x", "orders")) as source:
        assert source.receive(1, 0) == [Message("a")]
    told = r"'swan://u:\*\*\*@x' is not .*amqp://.*oncely.sources pigeon://, .*transports dove://$"
    with pytest.raises(ConfigError, match=told):
        open_source("swan://u:secret@x", "q")
