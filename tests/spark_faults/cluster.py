"""Spark's own cluster manager: a master and its workers, each on an address of its own."""

from collections.abc import Sequence
from pathlib import Path

import pyspark
from tests.servers import free_port
from tests.spark_faults.processes import Programs

MASTER = "127.0.0.1"
WORKER = "127.0.0.2"
SECOND_WORKER = "127.0.0.3"


def start_cluster(programs: Programs, folder: Path, cores: int, hosts: Sequence[str]) -> str:
    """Return the master's URL. There is a worker on each host; each has so many cores, and its
    executors work in a folder whose name begins as `folder`.
    """
    port = free_port()
    url = f"spark://{MASTER}:{port}"
    _spark_class(programs, "master.Master", MASTER, "--port", str(port))
    for host in hosts:
        sizes = ["--cores", str(cores), "--memory", "1g", "--work-dir", f"{folder}-{host}"]
        _spark_class(programs, "worker.Worker", host, *sizes, url)
    return url


def _spark_class(programs: Programs, name: str, host: str, *words: str) -> None:
    program = f"{pyspark.__path__[0]}/bin/spark-class"
    told = ["--host", host, "--webui-port", "0", *words]
    programs.start(program, f"org.apache.spark.deploy.{name}", *told)
