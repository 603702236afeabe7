"""The package as it is published: built once, and installed into fresh venvs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.server_fixtures import (  # noqa: F401 - fixtures.
    _empty_databases,
    kafka,
    kafka_url,
    mariadb,
    mysql_url,
    nats_url,
    postgresql,
    postgresql_url,
    rabbitmq,
    rabbitmq_url,
    redis_server,
    redis_url,
    sqs_url,
)

ROOT = Path(__file__).parents[1]


class Built(NamedTuple):
    """What is uploaded, and the wheel that the sources make without the sdist between."""

    sdist: Path
    wheel: Path
    straight: Path


def uv(*arguments: str | Path) -> None:
    """Run uv, where scripts/setup.sh finds or puts it."""
    command = shutil.which("uv") or ROOT / ".tools" / "bin" / "uv"
    # What this process was started with is of another venv.
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    subprocess.run([command, *arguments, "--quiet"], check=True, cwd=ROOT, env=environment)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist, and the wheels that it and the sources make."""
    dist, straight = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("straight")
    uv("build", "--sdist", "--out-dir", dist)
    [sdist] = dist.glob("*.tar.gz")
    uv("build", "--wheel", "--out-dir", dist, sdist)
    uv("build", "--wheel", "--out-dir", straight)
    [wheel], [other] = dist.glob("*.whl"), straight.glob("*.whl")
    return Built(sdist, wheel, other)


Install = Callable[..., Path]


@pytest.fixture
def install(built: Built, tmp_path: Path) -> Install:
    """Makes a venv with the wheel, some of its extras and packages besides; gives its Python.

    `on` is the Python that it is made with.
    """

    def installed(extras: Sequence[str], *packages: str, on: str | Path = sys.executable) -> Path:
        venv = tmp_path / "venv"
        uv("venv", "--python", on, venv)
        python = venv / "bin" / "python"
        names = f"[{','.join(extras)}]" if extras else ""
        uv(
            "pip",
            "install",
            "--python",
            python,
            f"oncely{names} @ {built.wheel.as_uri()}",
            *packages,
        )
        return python

    return installed
