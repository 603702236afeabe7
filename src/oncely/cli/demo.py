"""`oncely demo`: duplicates, a worker that is killed, a message in doubt that a person decides."""

import json
import os
import subprocess
import sys
import time
import webbrowser
from contextlib import closing, suppress
from importlib.resources import files
from pathlib import Path
from tempfile import mkdtemp

import oncely
from oncely import ops
from oncely.cli import options
from oncely.cli.terminal import Progress, loud
from oncely.core.errors import OncelyError

_WORK = ("consume", "worker:consumer", "--log-level=error", "--log-format=json")
_KILLER = "order-21"
_LOOK_S = 0.1


@options.command("demo", "oncely demo")
@options.flag("--no-browser", "print the dashboard's address, and do not open a browser")
def demo(no_browser: bool) -> None:
    """See it in ten seconds: duplicates, a killed worker, a message in doubt that you decide."""
    from oncely.cli.commands import run

    folder = Path(mkdtemp(prefix="oncely-demo-"))
    program = files("oncely.cli.templates").joinpath("demo_worker.py").read_bytes()
    (folder / "worker.py").write_bytes(program)
    url = f"sqlite:///{folder}/ledger.db"
    orders = [oncely.Message(f"order-{n}", b'{"cents": 990}') for n in range(1, 31)]
    with closing(oncely.open_ledger(url)) as ledger:
        ledger.migrate()
        _say("program", f"{folder}/worker.py charges the orders of a queue, into bank.txt")
        oncely.publish(url, "orders", [*orders[:20], *orders[:20:4], orders[20]])
        _say_counts(ledger, "orders are sent, some of them twice")
        _kill_while_it_charges(ledger, folder)
        oncely.publish(url, "orders", orders)
        _say_counts(ledger, "all of them are sent again, with new ones")
        _drain(ledger, folder)
        _say("in doubt", f"{_KILLER}: was it charged? The ledger cannot know, and holds it")
        for answer in ("--happened", "--not-happened"):
            _say("decide", f"oncely settle {_KILLER} {answer} --ledger {url}")
        if sys.stdout.isatty():
            _wait_for_decision(ledger, folder, opens=not no_browser)
        else:
            _say("then", f"cd {folder}; ONCELY_LEDGER={url} oncely consume worker:consumer --drain")
    print(f"\n$ oncely status --ledger {url}")
    run(["status", "--ledger", url])


def _say(word: str, text: str) -> None:
    from rich.console import Console

    state = "dead" if word == "killed" else word
    Console().print(loud(f"{word:<10}{text}", state), soft_wrap=True)


def _say_counts(ledger: oncely.Ledger, what: str) -> None:
    found = ops.status(ledger)
    total, queued = found.total.as_dict(), sum(each.waiting for each in found.queues.values())
    counts = f"{queued} in the queue, {total['completed']} completed"
    _say("ledger", f"{what}: {counts}, {total['duplicates']} duplicates")


def _start(folder: Path, *words: str, **env: str) -> "subprocess.Popen[str]":
    env |= {**os.environ, "ONCELY_LEDGER": f"sqlite:///{folder}/ledger.db"}
    command = [sys.executable, "-m", "oncely", *words]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


def _kill_while_it_charges(ledger: oncely.Ledger, folder: Path) -> None:
    with Progress("a worker is at work"), _start(folder, *_WORK, SLOW=_KILLER) as worker:
        try:
            if not (worker.stdout and worker.stdout.readline()):
                raise OncelyError("demo: the worker has ended by itself")
            # What it charged before is being recorded.
            while ops.status(ledger).total.as_dict()["processing"] > 1:
                time.sleep(_LOOK_S)
        finally:
            worker.kill()
    _say("killed", f"worker {worker.pid}, by kill -9, while it charged {_KILLER}")


def _drain(ledger: oncely.Ledger, folder: Path) -> None:
    with Progress("another worker is at work"), _start(folder, *_WORK, "--drain") as worker:
        worker.wait()
    _say_counts(ledger, f"worker {worker.pid} has nothing more to do")


def _wait_for_decision(ledger: oncely.Ledger, folder: Path, *, opens: bool) -> None:
    """Serve the dashboard until nothing is in doubt, or until Ctrl-C; then do what was decided."""
    with _start(folder, "web", "--port=0", "--json") as web:
        try:
            # Without it the command has said what to install.
            if told := web.stdout and web.stdout.readline():
                address = json.loads(told)["url"].replace("/?", "/in-doubt?")
                _say("or here", address)
                # A browser without a window would take over the terminal.
                windows = sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & {*os.environ}
                if opens and windows and "CI" not in os.environ:
                    webbrowser.open(address)
            with suppress(KeyboardInterrupt), Progress("waiting for your decision; Ctrl-C ends it"):
                while ops.status(ledger).total.in_doubt:
                    time.sleep(_LOOK_S)
            # The page that the decision leads to is still to be loaded.
            _drain(ledger, folder)
        finally:
            web.terminate()
