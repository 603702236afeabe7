"""The pages on HTTP frameworks and webhooks, followed as a reader follows them: files saved,
the server started, and what curl prints compared with what the page shows.
"""

import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.conditions import wait_until
from tests.docs.shell import DEADLINE_S, Shell, commands
from tests.servers import HOST, free_port
from tests.turns import in_turn

_HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
_PROGRAMS = Path(sys.executable).parent
_MODE = {"Save this as": "w", "Add this to": "a"}
_NAMED = re.compile(
    r"(Save this as|Add this to) `(\S+)`.*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL
)
_SETUP = re.compile(r"^(?:django-admin|python manage\.py (?:migrate|shell)).*$", re.MULTILINE)
_SERVER = re.compile(r"^(?:uvicorn|gunicorn|python manage\.py runserver)\b.*$", re.MULTILINE)
_CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TEST = {"django": "python manage.py test"}

PAGES = ["fastapi", "flask", "django", "stripe-webhooks", "github-webhooks"]


def save(page: str, folder: Path) -> None:
    """Write the files that the page tells to save."""
    for told, name, code in _NAMED.findall(page):
        with (folder / name).open(_MODE[told]) as file:
            file.write(f"\n\n{code}")


def server_command(page: str, port: int) -> list[str]:
    """What the page starts its server with, on a port of the test's own."""
    command = _SERVER.search(page)
    assert command is not None
    program, *words = command[0].split()
    there = {"uvicorn": ["--port", f"{port}"], "gunicorn": ["--bind", f"{HOST}:{port}"]}
    asked = there.get(program, ["--noreload", f"{port}"])
    return [str(_PROGRAMS / program), *words, *asked]


@contextmanager
def served(page: str, folder: Path, port: int) -> Iterator[None]:
    """The server of the page, from its first answer on."""
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            server_command(page, port), cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_until(lambda: answers(port), (folder / "log").read_text, programs=[server])
        yield
    finally:
        server.terminate()
        server.wait(DEADLINE_S)


def answers(port: int) -> bool:
    """Whether a server is there, whatever it answers."""
    try:
        urllib.request.urlopen(f"http://{HOST}:{port}/", timeout=DEADLINE_S).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True


def stands_in(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether all lines that are shown are printed, whatever is printed between them."""
    return set(filter(None, shown)) <= {line.rstrip("\r") for line in printed}


def follow(page: str, folder: Path) -> int:
    """Do what the page says; how many commands were typed.

    Raises AssertionError where a command fails, or the page shows what is not printed.
    """
    typed = 0
    port = free_port()
    with closing(Shell(folder, _PROGRAMS)) as shell:
        first, *setup = _SETUP.findall(page) or [":"]
        shell.type(first, 0)
        save(page, folder)
        for command in setup:
            shell.type(command, 0)
        with served(page, folder, port):
            for block in _CONSOLE.findall(page):
                for command, shown in commands(block):
                    # The answers end without a line's end.
                    here = command.replace("curl", "curl -s -w '\n'")
                    here = here.replace("localhost:8000", f"{HOST}:{port}")
                    printed = shell.type(here, len(shown))
                    assert stands_in(shown, printed), (command, printed)
                    typed += 1
    return typed


@pytest.mark.parametrize("name", in_turn("pages on HTTP", PAGES))
def test_page(name: str, tmp_path: Path) -> None:
    """Whoever follows the page sees what it shows; and the tests of the page pass."""
    assert follow((_HOW_TO / f"{name}.md").read_text(), tmp_path) >= 2
    with closing(Shell(tmp_path, _PROGRAMS)) as shell:
        shell.type(_TEST.get(name, "python -m pytest -p no:cacheprovider"), 0)
