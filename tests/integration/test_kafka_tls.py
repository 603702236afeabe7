"""A Kafka that speaks TLS and asks for a password: each wrong certificate and password is told."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.certificates import Authority
from tests.server_fixtures import available
from tests.servers import HOST, Kafka, free_port

from oncely.core.errors import TransportError
from oncely.core.message import Message
from oncely.core.verdicts import Ack
from oncely.transports.open_transport import open_transport

_LOGIN = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    'user_oncely="s3cret@home" username="oncely" password="s3cret@home";'
)


class SecuredKafka(Kafka):
    """A Kafka with one more listener, for TLS and SASL."""

    def secured_by(self, authority: Authority) -> None:
        """Show a certificate of that authority, from the start."""
        self.tls_port = free_port()
        issued = authority.issue("server", HOST)
        self._store = self.folder / "server.pem"
        self._store.write_bytes(issued.key.read_bytes() + issued.certificate.read_bytes())

    def _settings(self) -> dict[str, object]:
        settings = super()._settings()
        for name, added in (
            ("listeners", f"SASL_SSL://{HOST}:{self.tls_port}"),
            ("advertised.listeners", f"SASL_SSL://{HOST}:{self.tls_port}"),
            ("listener.security.protocol.map", "SASL_SSL:SASL_SSL"),
        ):
            settings[name] = f"{settings[name]},{added}"
        return {
            **settings,
            "inter.broker.listener.name": "PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl_ssl.plain.sasl.jaas.config": _LOGIN,
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": self._store,
        }


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """It has signed the broker's certificate."""
    return Authority(tmp_path, "authority")


@pytest.fixture
def secured(authority: Authority) -> Iterator[SecuredKafka]:
    """A Kafka with TLS and SASL."""
    server = available(SecuredKafka)
    server.secured_by(authority)
    with server:
        yield server


@pytest.mark.in_turn("TLS")
def test_tls_and_sasl(secured: SecuredKafka, authority: Authority, tmp_path: Path) -> None:
    """By the authority's file and the user in the URL; what is wrong is told, but no password."""
    at = f"{HOST}:{secured.tls_port}"
    trusted = f"cafile={authority.file}&confirm_timeout=20s"
    with closing(open_transport(f"kafka://oncely:s3cret%40home@{at}?{trusted}")) as transport:
        transport.publish("orders", [Message("1")])
        [delivery] = transport.receive("orders", 1, 60)
        transport.acknowledge([(delivery, Ack())])
        assert transport.is_drained("orders")
    other = Authority(tmp_path, "other").file
    for url, said in (
        (f"kafka://oncely:wr0ng@{at}?{trusted}", "uthentication failed"),
        (f"kafka://oncely:s3cret%40home@{at}?cafile={other}", "write .cafile=FILE"),
        (
            f"kafka://oncely:s3cret%40home@{HOST}:{secured.port}?{trusted}",
            "PLAINTEXT|does not speak TLS|SSL",
        ),
        (f"kafka://{at}?confirm_timeout=20s", "SSL listener|if they speak TLS"),
    ):
        with (
            closing(open_transport(url)) as transport,
            pytest.raises(TransportError, match=said) as raised,
        ):
            transport.publish("orders", [Message("2")])
        assert "\n" not in str(raised.value)
        assert not {"wr0ng", "s3cret"} & {*str(raised.value).replace("@", " ").split()}
