"""Servers of a test's own, from the machine's packages, on loopback."""

import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, ClassVar, Self
from urllib.parse import quote

from sqlalchemy import make_url

HOST = "127.0.0.1"

_START_S = 300.0
_STOP_S = 180.0
_ASK_AGAIN_S = 0.02
_ASK_TIMEOUT_S = 60
_PORT_TRIES = 5
# Below the ports that the kernel gives to outgoing connections: one of those would take the port
# of a server that is down for a moment, or a client that tries again would connect to itself.
_PORTS = range(15_000, 32_000)
# The last is what a node of Erlang says where something else has the port of its epmd.
_PORT_TAKEN = ("Address already in use", "eaddrinuse", "nodistribution")
_LOG_TAIL = 3000

# Outlives whoever started it. When told the end, or when its input ends because whoever started it
# has died, it ends the server whose process id it was told last (an empty line: none runs) and
# removes the folder. It is told, since a forked process may hold the other end of its input open.
# It asks the server before it kills it: a PostgreSQL that is killed leaves shared memory.
_UNDERTAKER = """
server=
while read -r line && [ "$line" != end ]; do server=$line; done
if [ -n "$server" ]; then
    kill -s "$2" -- "-$server"
    sleep 1
    kill -s KILL -- "-$server" 2>/dev/null
fi
rm -rf -- "$1"
"""


class MissingProgram(Exception):
    """A server's program is not on this machine; the message says what installs it."""


class ServerError(Exception):
    """A server does not start or stop; the message ends with what it said last."""


class Server(ABC):
    """A server in a temporary folder, on a port of its own. It is not running yet.

    `start` after `stop` or `kill` finds the data and the port of before. Once it is closed, or the
    process that made it has died in whatever way, nothing of it is left.
    Raises MissingProgram when this machine cannot run it.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    programs: ClassVar[tuple[str, ...]]
    account: ClassVar[str | None] = None
    """Who runs it where the tests are run by root, whom it refuses."""
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self) -> None:
        self._programs = [self._find(program) for program in self.programs]
        self._account = self.account if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self._has_answered = False
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"oncely-{self.package}-"))
        if self._account:
            shutil.chown(self.folder, self._account, self._account)
        self._undertaker = subprocess.Popen(
            ["/bin/sh", "-c", _UNDERTAKER, "undertaker", self.folder, str(int(self.stop_signal))],
            stdin=subprocess.PIPE,
            # Else Ctrl-C on the terminal would end it before its work.
            start_new_session=True,
        )

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it is, as oncely wants to be told."""

    def _prepare(self) -> None:
        """Make `data`."""
        self.data.mkdir()

    @abstractmethod
    def _command(self) -> Sequence[str | Path]:
        """What runs it in the foreground."""

    def _answers(self) -> bool:
        """Whether it serves clients."""
        with socket.socket() as probe:
            return not probe.connect_ex((HOST, self.port))

    @property
    def data(self) -> Path:
        """The folder with its data."""
        return self.folder / "data"

    @property
    def log(self) -> Path:
        """What it said since it was last started."""
        return self.folder / "log"

    def start(self) -> None:
        """Start it, and return once it answers. Raises ServerError when it does not."""
        assert self._process is None, f"{self.name} is running"
        if not self.data.exists():
            self._prepare()
        for _ in range(_PORT_TRIES):
            self._launch()
            if self._wait_for_answer():
                return
            # Clients already know the port of a server that was running.
            if self._has_answered or not any(said in self._last_words() for said in _PORT_TAKEN):
                break
            self.port = free_port()
        raise ServerError(f"{self.name} does not start:\n{self._last_words()}")

    def stop(self) -> None:
        """Stop it, as an operator would. Raises ServerError when it does not stop."""
        if self._process is None:
            return
        self._process.send_signal(self.stop_signal)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(f"{self.name} does not stop:\n{self._last_words()}") from None
        self._running(None)

    def restart(self) -> None:
        """Stop it and start it again."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        """Start it, for as long as the block."""
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self) -> None:
        """Kill it and its children at one moment; return once all are gone."""
        if self._process is None:
            return
        if self._process.poll() is None:
            _kill_family(self._process)
        self._running(None)

    def close(self) -> None:
        """Stop it and remove all that is left of it."""
        try:
            self.stop()
        finally:
            self._tell("end")
            self._undertaker.communicate()

    def _find(self, program: str) -> str:
        found = find_program(program)
        if found is None:
            raise MissingProgram(
                f"{self.name} is not installed; type: apt-get install {self.package}"
            )
        return found

    def _running(self, process: subprocess.Popen[bytes] | None) -> None:
        """Take note, and tell the undertaker."""
        self._process = process
        self._tell(str(process.pid) if process else "")

    def _tell(self, line: str) -> None:
        assert self._undertaker.stdin is not None
        self._undertaker.stdin.write(f"{line}\n".encode())
        self._undertaker.stdin.flush()

    def _launch(self) -> None:
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                self._command(), start_new_session=True, **self._surroundings(log)
            )
        self._running(process)

    def _run(self, *command: str | Path) -> None:
        """Run a program that prepares. Raises ServerError when it fails."""
        with self.log.open("wb") as log:
            done = subprocess.run(command, check=False, **self._surroundings(log))
        if done.returncode != 0:
            raise ServerError(f"{command[0]} fails:\n{self._last_words()}")

    def _surroundings(self, log: IO[bytes]) -> dict[str, Any]:
        """Arguments for a process that nothing in this process's environment can mislead."""
        identity: dict[str, Any] = {
            "user": self._account,
            "group": self._account,
            "extra_groups": [],
        }
        return {
            **(identity if self._account else {}),
            "cwd": self.folder,
            "env": {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            "stdin": subprocess.DEVNULL,
            "stdout": log,
            "stderr": subprocess.STDOUT,
        }

    def _wait_for_answer(self) -> bool:
        """Whether it answers before it ends or the time is up; it runs only if it does."""
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            if self._answers():
                self._has_answered = True
                return True
            time.sleep(_ASK_AGAIN_S)
        self.kill()
        return False

    def _last_words(self) -> str:
        return self.log.read_text(errors="replace")[-_LOG_TAIL:]


class Postgresql(Server):
    """A PostgreSQL, with the durability it has by default."""

    name = "PostgreSQL"
    package = "postgresql"
    programs = ("initdb", "postgres")
    account = "postgres"
    # The default, SIGTERM, waits for clients to leave.
    stop_signal = signal.SIGINT

    @property
    def url(self) -> str:
        return f"postgresql://oncely@{HOST}:{self.port}/postgres"

    def _prepare(self) -> None:
        initdb, _ = self._programs
        options = ("--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C.UTF-8")
        self._run(initdb, f"--pgdata={self.data}", "--username=oncely", *options)

    def _command(self) -> Sequence[str | Path]:
        _, postgres = self._programs
        settings = {
            "listen_addresses": HOST,
            "port": self.port,
            "unix_socket_directories": self.folder,
            "max_connections": 200,
            # In its folder, where it goes with it; one that is killed would leave it in /dev/shm.
            "dynamic_shared_memory_type": "mmap",
        }
        return [postgres, "-D", self.data, *(f"--{name}={settings[name]}" for name in settings)]

    def _answers(self) -> bool:
        return _speaks_postgresql(self.url)


def _speaks_postgresql(url: str) -> bool:
    import psycopg

    try:
        psycopg.connect(url, connect_timeout=_ASK_TIMEOUT_S).close()
    except psycopg.OperationalError:
        return False
    return True


class PgBouncer(Server):
    """A PgBouncer in front of a PostgreSQL, which lends few sessions for a transaction each."""

    name = "PgBouncer"
    package = "pgbouncer"
    programs = ("pgbouncer",)
    account = "postgres"

    SESSIONS = 3
    """For each database."""

    def __init__(self, upstream: str) -> None:
        super().__init__()
        self._upstream = make_url(upstream)

    @property
    def url(self) -> str:
        return self.url_of(self._upstream.database or "postgres")

    def url_of(self, database: str) -> str:
        """The URL of a database."""
        return f"postgresql://oncely@{HOST}:{self.port}/{database}?prepare_threshold=none"

    def _prepare(self) -> None:
        self._run("/bin/mkdir", self.data)

    def _command(self) -> Sequence[str | Path]:
        at = self._upstream
        password = f" password={at.password}" if at.password else ""
        settings = self.folder / "pgbouncer.ini"
        settings.write_text(
            "[databases]\n"
            f"* = host={at.host} port={at.port or 5432} user={at.username}{password}\n"
            "[pgbouncer]\n"
            f"listen_addr = {HOST}\n"
            f"listen_port = {self.port}\n"
            "unix_socket_dir =\n"
            "auth_type = any\n"
            "pool_mode = transaction\n"
            f"default_pool_size = {self.SESSIONS}\n"
            "max_client_conn = 200\n"
        )
        return [*self._programs, settings]

    def _answers(self) -> bool:
        return _speaks_postgresql(self.url.partition("?")[0])


class MariaDb(Server):
    """A MariaDB, with the durability it has by default."""

    name = "MariaDB"
    package = "mariadb-server"
    programs = ("mariadb-install-db", "mariadbd")
    account = "mysql"

    _SETUP = """
        CREATE DATABASE IF NOT EXISTS oncely;
        CREATE USER IF NOT EXISTS oncely@'%' IDENTIFIED BY 'secret';
        GRANT ALL ON *.* TO oncely@'%' WITH GRANT OPTION;
    """

    @property
    def url(self) -> str:
        return f"mysql://oncely:secret@{HOST}:{self.port}/oncely"

    def _prepare(self) -> None:
        install, _ = self._programs
        (self.folder / "setup.sql").write_text(self._SETUP)
        self._run(install, "--no-defaults", "--skip-test-db", f"--datadir={self.data}")

    def _command(self) -> Sequence[str | Path]:
        _, mariadbd = self._programs
        return [
            mariadbd,
            "--no-defaults",
            f"--datadir={self.data}",
            f"--tmpdir={self.folder}",
            f"--socket={self.folder / 'socket'}",
            f"--pid-file={self.folder / 'pid'}",
            f"--init-file={self.folder / 'setup.sql'}",
            f"--bind-address={HOST}",
            f"--port={self.port}",
            "--skip-name-resolve",
            "--character-set-server=utf8mb4",
            "--innodb-flush-log-at-trx-commit=1",
            "--max-connections=200",
        ]

    def _answers(self) -> bool:
        import pymysql

        try:
            pymysql.connect(
                host=HOST,
                port=self.port,
                user="oncely",
                password="secret",
                connect_timeout=_ASK_TIMEOUT_S,
                read_timeout=_ASK_TIMEOUT_S,
            ).close()
        except pymysql.OperationalError:
            return False
        return True


class Redis(Server):
    """A Redis that appends to a file, and that refuses writes rather than forget when full."""

    name = "Redis"
    package = "redis-server"
    programs = ("redis-server",)

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def _command(self) -> Sequence[str | Path]:
        settings = {
            "bind": HOST,
            "port": self.port,
            "dir": self.data,
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "save": "",
        }
        arguments = [(f"--{name}", str(value)) for name, value in settings.items()]
        return [*self._programs, *(word for argument in arguments for word in argument)]

    def _answers(self) -> bool:
        import redis

        with redis.Redis.from_url(self.url, socket_timeout=_ASK_TIMEOUT_S, retry=None) as client:
            try:
                return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError):
                return False


class Nats(Server):
    """A NATS server with JetStream."""

    name = "NATS"
    package = "nats-server"
    programs = ("nats-server",)

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"

    def _command(self) -> Sequence[str | Path]:
        return [*self._programs, "-a", HOST, "-p", str(self.port), "-js", "-sd", self.data]


class Moto(Server):
    """Amazon's SQS, as the package moto plays it, in memory."""

    name = package = "moto"
    programs = ()

    @property
    def url(self) -> str:
        return f"sqs://eu-central-1?endpoint=http://{HOST}:{self.port}"

    def _command(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port)]


_NO_BUSY_WAIT = "+sbwt none +sbwtdcpu none +sbwtdio none"
"""For a node that shares its processors with others, as RabbitMQ's own guide advises."""


class Rabbitmq(Server):
    """A RabbitMQ node, alone, without plugins; nothing of it is known to other Erlang programs."""

    name = "RabbitMQ"
    package = "rabbitmq-server"
    programs = ("rabbitmq-server", "epmd", "erl_call")
    account = "rabbitmq"

    _NODE = "oncely@localhost"
    _COOKIE = "oncely"
    # To look through all that are installed takes it seconds. What it starts is found elsewhere.
    _PLUGINS = ("rabbit", "rabbit_common", "rabbitmq_prelaunch")

    @property
    def url(self) -> str:
        return self.url_of("/")

    def url_of(self, vhost: str) -> str:
        """The URL of a vhost."""
        return f"amqp://oncely:secret@{HOST}:{self.port}/{quote(vhost, safe='')}"

    def evaluate(self, expression: str) -> str:
        """What an Erlang expression comes to in the node: in milliseconds, unlike rabbitmqctl.

        Raises ServerError when it fails.
        """
        *_, erl_call = self._programs
        told = [erl_call, "-c", self._COOKIE, "-address", f"{HOST}:{self._dist_port}", "-e"]
        said = self._said(told, f"{expression}.\n")
        if not said.startswith("{ok, "):
            raise ServerError(f"{expression} fails:\n{said}")
        return said.removeprefix("{ok, ").removesuffix("}")

    def add_user(self, name: str, password: str, vhost: str, *permissions: str) -> None:
        """Make a user with these permissions to configure, write and read in one vhost."""
        allowed = ", ".join(f'<<"{pattern}">>' for pattern in permissions)
        self.evaluate(
            f'rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"{password}">>, <<"tests">>), '
            f'rabbit_auth_backend_internal:set_permissions(<<"{name}">>, <<"{vhost}">>, '
            f'{allowed}, <<"tests">>)'
        )

    def delete_user(self, name: str) -> None:
        """Whatever it may do."""
        self.evaluate(f'rabbit_auth_backend_internal:delete_user(<<"{name}">>, <<"tests">>)')

    def close_connections(self, vhost: str) -> None:
        """As an operator does."""
        self.evaluate(
            '[rabbit_networking:close_connection(Pid, "a test") || [{pid, Pid}, {vhost, '
            f'<<"{vhost}">>}}] <- rabbit_networking:connection_info_all([pid, vhost])]'
        )

    def start(self) -> None:
        super().start()
        # A quorum queue alone on its node, made just before that was killed, may find no leader
        # when it is back, nor look for one, until somebody tells it to.
        self.evaluate(
            "[ra:trigger_election({Name, node()}) "
            "|| {Name, _} <- ra_directory:list_registered(quorum_queues)]"
        )

    def kill(self) -> None:
        # Else a node of RabbitMQ 3.10 forgets, with all in them, the quorum queues that were made
        # in its last second: nobody who publishes to them can know. One that does not answer has
        # nothing to forget.
        with suppress(ServerError):
            self.evaluate("[dets:sync(Table) || Table <- dets:all()]")
        super().kill()

    def add_vhost(self, name: str) -> None:
        """Make an empty vhost that the user of `url` may use."""
        self.evaluate(
            f'rabbit_vhost:add(<<"{name}">>, <<"oncely">>), '
            "rabbit_auth_backend_internal:set_permissions("
            f'<<"oncely">>, <<"{name}">>, <<".*">>, <<".*">>, <<".*">>, <<"oncely">>)'
        )

    def delete_vhost(self, name: str) -> None:
        """Remove a vhost and all that is in it."""
        self.evaluate(f'rabbit_vhost:delete(<<"{name}">>, <<"oncely">>)')

    @property
    def _dist_port(self) -> int:
        return self.port + 1

    @property
    def _epmd_port(self) -> int:
        return self.port + 2

    @property
    def _plugins(self) -> Path:
        return self.folder / "plugins"

    @property
    def _settings(self) -> Path:
        return self.folder / "rabbitmq.conf"

    def _prepare(self) -> None:
        self._run("/bin/mkdir", self.data)
        self._plugins.mkdir()
        for name in self._PLUGINS:
            for found in Path("/usr/lib/rabbitmq/lib").glob(f"*/plugins/{name}-[0-9]*"):
                (self._plugins / found.name).symlink_to(found)

    def _command(self) -> Sequence[str | Path]:
        server, epmd, _ = self._programs
        self._settings.write_text(
            f"listeners.tcp.1 = {HOST}:{self.port}\n"
            "default_user = oncely\n"
            "default_pass = secret\n"
            "log.console = true\n"
            "log.file = false\n"
        )
        return ["/bin/sh", "-c", f'"{epmd}" & exec "{server}"']

    def _surroundings(self, log: IO[bytes]) -> dict[str, Any]:
        surroundings = super()._surroundings(log)
        surroundings["env"] |= {
            "LC_ALL": "C.UTF-8",
            "HOME": str(self.folder),
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_NODENAME": self._NODE,
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"-setcookie {self._COOKIE} {_NO_BUSY_WAIT}",
            "RABBITMQ_CONFIG_FILE": str(self._settings),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_MNESIA_BASE": str(self.data),
            "RABBITMQ_LOG_BASE": str(self.folder),
            "RABBITMQ_PLUGINS_DIR": str(self._plugins),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled"),
            # Then its start script becomes the node, and does not stand between it and us.
            "RUNNING_UNDER_SYSTEMD": "true",
        }
        return surroundings

    def _answers(self) -> bool:
        import pika
        from pika.exceptions import AMQPError

        try:
            pika.BlockingConnection(pika.URLParameters(self.url)).close()
        except (AMQPError, OSError):
            return False
        return True

    def _running(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is None and self._process is not None:
            # The node's own children, and epmd, which outlives it.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        super()._running(process)

    def _said(self, command: Sequence[str], told: str = "") -> str:
        with (self.folder / "said").open("w+b") as said:
            surroundings = self._surroundings(said)
            del surroundings["stdin"]
            done = subprocess.run(command, check=False, input=told.encode(), **surroundings)
            said.seek(0)
            text = said.read().decode(errors="replace")
        if done.returncode != 0:
            raise ServerError(f"{command[0]} fails:\n{text}")
        return text


class Kafka(Server):
    """An Apache Kafka of one node, broker and controller in one, without TLS."""

    name = "Kafka"
    package = "kafka"
    programs = ("java",)

    _JARS = Path(__file__).parents[1] / ".tools" / "kafka"
    _HEAP = ("-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
    _CLUSTER = "b25jZWx5LW9uY2VseS1vbg"

    def __init__(self) -> None:
        if not (self._JARS / ".ready").exists():
            raise MissingProgram(f"{self.name} is not in {self._JARS}; type: make servers")
        super().__init__()

    @property
    def address(self) -> str:
        """Where clients find it."""
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"kafka://{self.address}"

    def _prepare(self) -> None:
        self._run(
            *self._java("kafka.tools.StorageTool"),
            *("format", "--cluster-id", self._CLUSTER, "--config", self._write_settings()),
        )

    def _command(self) -> Sequence[str | Path]:
        return [*self._java("kafka.Kafka"), self._write_settings()]

    def _java(self, program: str) -> Sequence[str | Path]:
        return [*self._programs, *self._HEAP, "-cp", f"{self._JARS}/*", program]

    def _settings(self) -> dict[str, object]:
        """The settings of the node."""
        controller = f"{HOST}:{self.port + 1}"
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": self.data,
            "num.partitions": 1,
            "offsets.topic.num.partitions": 1,
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            # Nobody waits for others that might join a group.
            "group.initial.rebalance.delay.ms": 0,
            "group.min.session.timeout.ms": 1_000,
            "auto.create.topics.enable": "false",
        }

    def _write_settings(self) -> Path:
        settings = self._settings()
        file = self.folder / "server.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        return file

    def _answers(self) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        if not super()._answers():
            return False
        try:
            client = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
            return bool(client.list_topics(timeout=_ASK_TIMEOUT_S).brokers)
        except KafkaException:
            return False


def spark_kafka_jars() -> str:
    """The jars of Spark's Kafka source, as the setting `spark.jars` has them."""
    folder = Path(__file__).parents[1] / ".tools" / "spark-kafka"
    if not (folder / ".ready").exists():
        raise MissingProgram(f"Spark's Kafka source is not in {folder}; type: make servers")
    return ",".join(map(str, folder.glob("*.jar")))


def create_topic(brokers: str, name: str, partitions: int, **settings: str) -> None:
    """Create a topic of Kafka, whose settings are named as there."""
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    client = AdminClient({"bootstrap.servers": brokers, "log_level": 0})
    [made] = client.create_topics([NewTopic(name, partitions, config=settings)]).values()
    made.result(_ASK_TIMEOUT_S)


def find_program(name: str) -> str | None:
    """Where a server's program is; Debian keeps some off the PATH."""
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"),
        key=lambda folder: float(folder.parent.name),
        reverse=True,
    )
    folders = [
        # Debian's own scripts around these run them as one account, in one place only.
        "/usr/lib/rabbitmq/bin",
        os.environ.get("PATH", os.defpath),
        "/usr/sbin",
        *map(str, versions),
    ]
    return shutil.which(name, path=os.pathsep.join(folders))


def free_port() -> int:
    """A port that nothing listens on."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port


def _kill_family(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children; return once all are gone."""
    # One that is stopped starts no more children, and its children's ids stay theirs.
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    children = [os.pidfd_open(child) for child in _children(process.pid)]
    try:
        for child in children:
            signal.pidfd_send_signal(child, signal.SIGKILL)
        process.kill()
        process.wait()
        for child in children:
            select.select([child], [], [], _STOP_S)
    finally:
        for child in children:
            os.close(child)


def _children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]
