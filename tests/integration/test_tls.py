"""Servers that speak TLS: the right certificates are enough, each wrong one is told in a line."""

import asyncio
import re
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import psycopg
import pymysql
import pytest
import redis
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from tests.certificates import Authority, Issued
from tests.cli.conftest import ran_here
from tests.conditions import LIMIT_S, wait_until
from tests.server_fixtures import available
from tests.servers import HOST, Kafka, MariaDb, Postgresql, Rabbitmq, Redis, Server, free_port

from oncely._util.tls import advice
from oncely.consumer import Consumer
from oncely.core.commands import Granted
from oncely.core.errors import ConfigError, StoreError, TransportError
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.core.verdicts import Ack
from oncely.ledger.async_ledger import AsyncLedger
from oncely.ledger.ledger import open_ledger
from oncely.transports.open_transport import open_transport

ELSEWHERE = "localhost"
"""The same server under a name that its certificate does not have."""


class Secured(Server):
    """A server that shows a certificate, and knows clients by theirs."""

    tls_port: int
    OPTIONS: tuple[str, str, str]
    """In its URL: authority, the client's certificate and its key."""
    served: Issued

    def secured_by(self, authority: Authority) -> None:
        """Show certificates of that authority, and trust it, from the start."""
        self.ca = self._taken(authority.file, "ca.pem")
        self.show(authority.issue("server", HOST))

    def show(self, issued: Issued) -> None:
        """Show another certificate from now on."""
        certificate = self._taken(issued.certificate, "server.pem")
        self.served = Issued(certificate, self._taken(issued.key, "server.key"))
        if self._process is not None:
            self.read_again()

    def _taken(self, file: Path, name: str) -> Path:
        taken = self.folder / name
        shutil.copy(file, taken)
        if self._account:
            shutil.chown(taken, self._account, self._account)
        return taken

    @abstractmethod
    def read_again(self) -> None:
        """Read the certificate's files again."""

    @abstractmethod
    def secure_url(self, host: str, user: str) -> str:
        """Where it speaks TLS; `guarded` is a user who has to show a certificate."""


class SecuredPostgresql(Secured, Postgresql):
    OPTIONS = ("sslmode=verify-full&sslrootcert", "sslcert", "sslkey")

    def _prepare(self) -> None:
        super()._prepare()
        (self.data / "pg_hba.conf").write_text(
            "hostssl all oncely 127.0.0.1/32 trust\n"
            "hostssl all guarded 127.0.0.1/32 trust clientcert=verify-ca\n"
        )

    def _command(self) -> Sequence[str | Path]:
        files = {"ca": self.ca, "cert": self.served.certificate, "key": self.served.key}
        settings = [f"--ssl_{name}_file={file}" for name, file in files.items()]
        return [*super()._command(), "--ssl=on", *settings]

    def start(self) -> None:
        super().start()
        self._execute("CREATE ROLE guarded SUPERUSER LOGIN")

    def read_again(self) -> None:
        self._execute("SELECT pg_reload_conf()")

    def secure_url(self, host: str, user: str) -> str:
        return f"postgresql://{user}:secret@{host}:{self.port}/postgres"

    def _execute(self, statement: str) -> None:
        with closing(psycopg.connect(self.url, autocommit=True)) as connection:
            connection.execute(statement.encode())


class SecuredMariaDb(Secured, MariaDb):
    OPTIONS = ("ssl_ca", "ssl_cert", "ssl_key")

    def _command(self) -> Sequence[str | Path]:
        files = {"ca": self.ca, "cert": self.served.certificate, "key": self.served.key}
        return [*super()._command(), *(f"--ssl-{name}={file}" for name, file in files.items())]

    _SETUP = (
        MariaDb._SETUP
        + """
        CREATE USER IF NOT EXISTS guarded@'%' IDENTIFIED BY 'secret' REQUIRE X509;
        GRANT ALL ON *.* TO guarded@'%';
        """
    )

    def read_again(self) -> None:
        with (
            closing(
                pymysql.connect(host=HOST, port=self.port, user="oncely", password="secret")
            ) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("FLUSH SSL")

    def secure_url(self, host: str, user: str) -> str:
        return f"mysql://{user}:secret@{host}:{self.port}/oncely"


class SecuredRedis(Secured, Redis):
    OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")

    def __init__(self) -> None:
        super().__init__()
        self.tls_port = free_port()

    def _command(self) -> Sequence[str | Path]:
        files = {"ca-cert": self.ca, "cert": self.served.certificate, "key": self.served.key}
        options = [word for name, file in files.items() for word in (f"--tls-{name}-file", file)]
        port = ("--tls-port", str(self.tls_port), "--tls-auth-clients", "optional")
        return [*super()._command(), *port, *options]

    def read_again(self) -> None:
        self.set("tls-cert-file", str(self.served.certificate))

    def set(self, name: str, value: str) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.config_set(name, value)

    def secure_url(self, host: str, user: str) -> str:
        # It has no users who need a certificate, where others do not.
        self.set("tls-auth-clients", "yes" if user == "guarded" else "optional")
        return f"rediss://{host}:{self.tls_port}/0"


class SecuredRabbitmq(Secured, Rabbitmq):
    OPTIONS = ("cafile", "certfile", "keyfile")

    def __init__(self) -> None:
        super().__init__()
        self.tls_port = free_port()

    def _command(self) -> Sequence[str | Path]:
        command = super()._command()
        with self._settings.open("a") as settings:
            settings.write(
                f"listeners.ssl.1 = {HOST}:{self.tls_port}\n"
                f"ssl_options.cacertfile = {self.ca}\n"
                f"ssl_options.certfile = {self.served.certificate}\n"
                f"ssl_options.keyfile = {self.served.key}\n"
                "ssl_options.verify = verify_peer\n"
                "ssl_options.fail_if_no_peer_cert = true\n"
            )
        return command

    def read_again(self) -> None:
        self.evaluate("ssl:clear_pem_cache()")

    def secure_url(self, host: str, user: str) -> str:
        return f"amqps://oncely:secret@{host}:{self.tls_port}/%2F"


class SecuredKafka(Secured, Kafka):
    """With one more listener, for TLS and users, who may do what is not forbidden."""

    OPTIONS = ("ssl.ca.location", "", "")

    def __init__(self) -> None:
        super().__init__()
        self.tls_port = free_port()

    def _settings(self) -> dict[str, object]:
        settings = super()._settings()
        for name, added in (
            ("listeners", f"SASL_SSL://{HOST}:{self.tls_port}"),
            ("advertised.listeners", f"SASL_SSL://{HOST}:{self.tls_port}"),
            ("listener.security.protocol.map", "SASL_SSL:SASL_SSL"),
        ):
            settings[name] = f"{settings[name]},{added}"
        store = self.folder / "store.pem"
        store.write_bytes(self.served.key.read_bytes() + self.served.certificate.read_bytes())
        plain = "org.apache.kafka.common.security.plain.PlainLoginModule required"
        return {
            **settings,
            "inter.broker.listener.name": "PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl_ssl.plain.sasl.jaas.config": f'{plain} user_oncely="s3cret@home";',
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": store,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
            "super.users": "User:ANONYMOUS",
        }

    def read_again(self) -> None:
        """Not at all."""

    def secure_url(self, host: str, user: str) -> str:
        return f"kafka://{user}@{host}:{self.tls_port}"


class Certified:
    """A server, the authority that it and its clients know, and one that neither knows."""

    def __init__(self, server: Secured, folder: Path) -> None:
        self.server = server
        self.ours, self.others = Authority(folder, "ours"), Authority(folder, "others")
        self.client = self.ours.issue("client")
        self.stranger = self.others.issue("stranger")
        server.secured_by(self.ours)

    def url(
        self,
        host: str = HOST,
        user: str = "guarded",
        ca: Path | None = None,
        client: Issued | None = None,
    ) -> str:
        """A URL of the server, with the files that are named."""
        ca_is, certificate_is, key_is = self.server.OPTIONS
        options = [f"{ca_is}={ca or self.ours.file}"]
        if client is not None:
            options += [f"{certificate_is}={client.certificate}", f"{key_is}={client.key}"]
        return f"{self.server.secure_url(host, user)}?{'&'.join(options)}"


@pytest.fixture
def certified(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Certified]:
    """A server of the kind that is asked for, with certificates."""
    server = available(request.param)
    made = Certified(server, tmp_path)
    with server:
        yield made


def told_by_ledger(url: str) -> set[str]:
    """What each face says of a ledger that cannot be reached."""
    told = set()
    with closing(open_ledger(url)) as ledger:
        with pytest.raises(StoreError) as raised:
            ledger.now()
        told.add(str(raised.value))
        with pytest.raises(StoreError) as raised:
            asyncio.run(AsyncLedger(ledger).now())
        told.add(str(raised.value))
    code, out, err = ran_here("check", "--ledger", url)
    # 3 where the driver says no more than that the server cannot be reached.
    assert (code, out) in ((1, ""), (3, ""))
    assert err.count("\n") == 1
    told.add(err.strip())
    return told


def told_by_transport(url: str) -> set[str]:
    """The same of a broker."""
    told = set()
    with closing(open_transport(url)) as transport:
        for call in (
            lambda: transport.publish("orders", [Message("1")]),
            lambda: transport.receive("orders", 1, 0.0),
            lambda: Consumer(url, "orders").consume(lambda _: None, drain=True),
        ):
            with pytest.raises(TransportError) as raised:
                call()
            told.add(str(raised.value))
    return told


def check_wrong(certified: Certified, told_by: Callable[[str], set[str]]) -> None:
    """Each wrong certificate is told in one line, with what to write; no password is in it."""
    ca_is, certificate_is, _ = certified.server.OPTIONS
    needs = rf"accepts (only clients|this user).*\?{certificate_is}="
    unknown = rf"authority is not known here: write \?{ca_is.rpartition('&')[2]}=FILE"
    client = certified.client
    wrong = [
        (certified.url(ELSEWHERE, client=client), "is not for the name in the URL"),
        (certified.url(ca=certified.others.file, client=client), unknown),
        (certified.url(), needs),
        (certified.url(client=certified.stranger), needs),
    ]
    for url, expected in wrong:
        for told in told_by(url):
            assert re.search(expected, told), told
            assert "secret" not in told
            assert "\n" not in told
    certified.server.show(certified.ours.issue("late", HOST, is_expired=True))
    expired = certified.url(client=client)
    wait_until(lambda: all("has expired" in told for told in told_by(expired)))
    with pytest.raises(ConfigError, match=rf"{ca_is.rpartition('&')[2]}: 'missing.pem' cannot"):
        told_by(certified.url(ca=Path("missing.pem"), client=client))


@pytest.mark.in_turn("TLS")
@pytest.mark.parametrize(
    "certified", [SecuredPostgresql, SecuredMariaDb, SecuredRedis], indirect=True
)
def test_ledger(certified: Certified) -> None:
    """A ledger behind TLS works, and says what is wrong where it does not."""
    for user, client in (("oncely", None), ("guarded", certified.client)):
        url = certified.url(user=user, client=client)
        with closing(open_ledger(url)) as ledger:
            ledger.migrate()
            assert isinstance(ledger.claim(Key("billing", user)), Granted)
            assert isinstance(asyncio.run(AsyncLedger(ledger).claim(Key("mail", user))), Granted)
        assert ran_here("check", "--ledger", url).code in {0, 1}
    check_wrong(certified, told_by_ledger)


@pytest.mark.in_turn("TLS")
@pytest.mark.parametrize("certified", [SecuredRabbitmq], indirect=True)
def test_transport(certified: Certified) -> None:
    """A broker behind TLS: messages of all sizes are published and consumed."""
    url = certified.url(client=certified.client)
    bodies = [bytes(size) for size in (0, 1, 5_000, 70_000, 1_000_000)]
    received = []
    with closing(open_transport(url)) as transport:
        messages = [Message(str(n), bodies[n % len(bodies)]) for n in range(200)]
        transport.publish("orders", messages)
        report = Consumer(url, "orders").consume(
            lambda message: received.append(message.body), drain=True
        )
    assert report.handled == 200
    assert received == [message.body for message in messages]
    check_wrong(certified, told_by_transport)
    plain = url.replace(str(certified.server.tls_port), str(certified.server.port), 1)
    for told in told_by_transport(plain):
        assert "this port does not speak TLS: name the port that does, or write amqp://" in told


@pytest.mark.in_turn("TLS")
@pytest.mark.parametrize("certified", [SecuredKafka], indirect=True)
def test_kafka(certified: Certified) -> None:
    """Kafka with a user in the URL; what is wrong is told in a line without the password."""
    user = "oncely:s3cret%40home"
    with closing(open_transport(certified.url(user=user))) as transport:
        transport.publish("orders", [Message("1")])
        [delivery] = transport.receive("orders", 1, LIMIT_S)
        transport.acknowledge([(delivery, Ack())])
        assert transport.is_drained("orders")
    plain = f"{HOST}:{certified.server.port}"
    group = (ResourceType.GROUP, "oncely-guarded", ResourcePatternType.LITERAL)
    denied = AclBinding(*group, "User:oncely", "*", AclOperation.READ, AclPermissionType.DENY)
    [forbidden] = AdminClient({"bootstrap.servers": plain}).create_acls([denied]).values()
    forbidden.result(LIMIT_S)
    at = f"{HOST}:{certified.server.tls_port}"
    for url, said in (
        (certified.url(user=user), "Group authorization failed"),
        (certified.url(user="oncely:wr0ng"), "Authentication failed"),
        (certified.url(user=user, ca=certified.others.file), "certificate verify failed"),
        (certified.url(user=user).replace(at, plain), "PLAINTEXT"),
        (f"kafka://{at}", r"write \?security.protocol=ssl"),
    ):
        with (
            closing(open_transport(url)) as transport,
            pytest.raises(TransportError, match=f"^Kafka: .*{said}.*$") as raised,
        ):
            transport.receive("guarded", 1, LIMIT_S)
        assert not re.search("wr0ng|s3cret", str(raised.value))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("server does not support SSL, but SSL was required", "write ?sslmode=disable"),
        ("SSL is required but the server doesn't support it", "does not speak TLS"),
        ("no pg_hba.conf entry for host 127.0.0.1, no encryption", "accepts only TLS"),
        ("[SSL: RECORD_LAYER_FAILURE] record layer failure", "does not speak TLS"),
        ("server closed the connection unexpectedly", ""),
        ("password authentication failed for user", ""),
    ],
)
def test_advice(said: str, expected: str) -> None:
    """What servers say without TLS where it is asked for, and with it where it is not."""
    told = advice(said, "postgresql")
    assert expected in told
    assert bool(told) is bool(expected)
