"""`oncely demo`: duplicates, a worker that is killed, a message in doubt that a person decides."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import webbrowser
from contextlib import closing, suppress
from pathlib import Path
from tempfile import mkdtemp

import oncely
from oncely import ops
from oncely.cli import options
from oncely.cli.terminal import Progress, loud

_WORK = ("consume", "worker:consumer", "--drain", "--log-level=error", "--log-format=json")
_KILLER = "order-21"


@options.command("demo", "oncely demo")
@options.flag("--no-browser", "print the dashboard's address, and do not open a browser")
def demo(no_browser: bool) -> None:
    """See it in ten seconds: duplicates, a killed worker, a message in doubt that you decide."""
    from oncely.cli.commands import run

    folder = Path(mkdtemp(prefix="oncely-demo-"))
    shutil.copy(Path(__file__).parent / "templates" / "demo_worker.py", folder / "worker.py")
    url = f"sqlite:///{folder}/ledger.db"
    orders = [oncely.Message(f"order-{n}", b'{"cents": 990}') for n in range(1, 31)]
    with closing(oncely.open_ledger(url)) as ledger:
        ledger.migrate()
        _say("program", f"{folder}/worker.py charges the orders of a queue, into bank.txt")
        oncely.publish(url, "orders", [*orders[:20], *orders[:20:4]])
        _say_counts(ledger, "orders are sent, some of them twice")
        _work(ledger, folder)
        oncely.publish(url, "orders", [orders[20]])
        _work(ledger, folder, KILLED_AT=_KILLER)
        oncely.publish(url, "orders", orders)
        _say_counts(ledger, "all of them are sent again, with new ones")
        _work(ledger, folder)
        doubt = f"{ops.status(ledger).total.in_doubt} message, {_KILLER}"
        _say("in doubt", f"{doubt}: was it charged? The ledger cannot know, and holds it")
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

    Console().print(loud(f"{word:<10}{text}", word), soft_wrap=True)


def _say_counts(ledger: "oncely.Ledger", what: str) -> None:
    found = ops.status(ledger)
    total, queued = found.total.as_dict(), sum(each.waiting for each in found.queues.values())
    counts = f"{queued} in the queue, {total['completed']} completed"
    _say("ledger", f"{what}: {counts}, {total['duplicates']} duplicates")


def _start(folder: Path, *words: str, **env: str) -> "subprocess.Popen[str]":
    env |= {**os.environ, "ONCELY_LEDGER": f"sqlite:///{folder}/ledger.db"}
    command = [sys.executable, "-m", "oncely", *words]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


def _work(ledger: "oncely.Ledger", folder: Path, **env: str) -> None:
    """Let a worker handle what there is."""
    with Progress("a worker is at work"), _start(folder, *_WORK, **env) as worker:
        code = worker.wait()
    if code == -signal.SIGKILL:
        _say("dead", f"worker {worker.pid}: killed by kill -9, after it charged {_KILLER}")
    else:
        _say_counts(ledger, f"worker {worker.pid} has nothing more to do")


def _wait_for_decision(ledger: "oncely.Ledger", folder: Path, *, opens: bool) -> None:
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
                    time.sleep(0.1)
            # The page that the decision leads to is still to be loaded.
            _work(ledger, folder)
        finally:
            web.terminate()
