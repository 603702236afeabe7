"""Spark's own cluster manager: a master and two workers, each on an address of its own."""

from pathlib import Path

import pyspark
from tests.servers import free_port
from tests.spark_faults.processes import Programs

MASTER = "127.0.0.1"
_WORKERS = ("127.0.0.2", "127.0.0.3")
"""Spark runs a second copy of a task on another host only."""


def start_cluster(programs: Programs, folder: Path, cores: int) -> str:
    """Return the master's URL. Each worker has so many cores, and its executors work in a folder
    whose name begins as `folder`.
    """
    port = free_port()
    url = f"spark://{MASTER}:{port}"
    _spark_class(programs, "master.Master", MASTER, "--port", str(port))
    for host in _WORKERS:
        sizes = ["--cores", str(cores), "--memory", "1g", "--work-dir", f"{folder}-{host}"]
        _spark_class(programs, "worker.Worker", host, *sizes, url)
    return url


def _spark_class(programs: Programs, name: str, host: str, *words: str) -> None:
    program = f"{pyspark.__path__[0]}/bin/spark-class"
    told = ["--host", host, "--webui-port", "0", *words]
    programs.start(program, f"org.apache.spark.deploy.{name}", *told)
