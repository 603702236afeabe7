"""`oncely init`: asks what to process and where, and writes a first program that runs."""

import io
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import click

from oncely.cli import options, values
from oncely.cli.starters import LOAD, SETTINGS, STARTERS, STORES, LedgerKind, Starter, contents
from oncely.cli.terminal import say
from oncely.core.errors import ConfigError
from oncely.core.shown import shown


@options.command("init", "oncely init webhooks --delivery webhook --store postgresql")
@click.argument(
    "folder",
    metavar="[FOLDER]",
    shell_complete=values.folders,
    default=".",
    help="the folder to write it to  [default: the current folder]",
)
@options.option(
    "--delivery",
    [*STARTERS],
    f"what to process once: {'; '.join(f'{n}: {s.text}' for n, s in STARTERS.items())}",
)
@options.option(
    "--store",
    [*STORES],
    f"where to keep the ledger: {'; '.join(f'{n}: {s.text}' for n, s in STORES.items())}"
    "  [default: sqlite]",
)
@options.flag("--force", "overwrite existing files")
def init(folder: str, delivery: str | None, store: str | None, force: bool) -> None:
    """Write a first program that runs."""
    delivery, store = _answers(delivery, store)
    texts = contents(delivery, store)
    _write(Path(folder), texts, force=force)
    print(shown(f"wrote {', '.join(str(Path(folder, name)) for name in texts)}"))
    print("\n".join(_told(Path(folder), delivery, store)))


def _answers(delivery: str | None, store: str | None) -> tuple[str, str]:
    """The way in which work arrives, and the store; asked for if no option says it."""
    if delivery is None:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"init: not a terminal: add --delivery {_listed(STARTERS)} "
                f"(and --store {_listed(STORES)}; default: sqlite)"
            )
        if isinstance(sys.stdin, io.TextIOWrapper):
            # An answer that cannot be decoded is only a wrong answer.
            sys.stdin.reconfigure(errors="replace")
        delivery = _asked("What do you want to process once?", STARTERS)
        if store is None:
            queues = STARTERS[delivery].has_queues
            kinds = {name: kind for name, kind in STORES.items() if name != "redis" or not queues}
            store = _asked("Where do you want to keep the ledger?", kinds)
    if store == "redis" and STARTERS[delivery].has_queues:
        raise ConfigError(
            f"init: Redis keeps no queues, which --delivery {delivery} needs; take --store sqlite, "
            "postgresql or mysql"
        )
    return delivery, store or "sqlite"


def _listed(names: Mapping[str, object]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}"


def _asked(question: str, choices: Mapping[str, Starter | LedgerKind]) -> str:
    """One of the choices, by its number or name. Raises ConfigError if there is no answer."""
    # On stderr: stdout may be read by a program.
    say(question)
    numbers = {str(number): name for number, name in enumerate(choices, 1)}
    for number, name in numbers.items():
        say(f"  {number}  {name:<10}  {choices[name].text}")
    while True:
        print(f"Number or name [{numbers['1']}]: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise ConfigError("init: no answer; nothing was written")
        answer = line.strip().lower() or "1"
        if answer in choices or answer in numbers:
            return numbers.get(answer, answer)


def _write(folder: Path, texts: Mapping[str, str], *, force: bool) -> None:
    """Write all files, or none if one of them exists. Raises ConfigError."""
    if not force:
        # A dangling link counts, too: the file would be written to its target.
        found = [str(folder / name) for name in texts if os.path.lexists(folder / name)]
        if found:
            raise ConfigError(
                f"init: already there: {', '.join(found)}; name another folder, or add --force to "
                "overwrite"
            )
    try:
        for name, text in texts.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if name == SETTINGS:
                # It has secrets: nobody else reads it, and git leaves it out.
                file.touch(mode=0o600)
                file.chmod(0o600)
                ignored = file.with_name(".gitignore")
                lines = ignored.read_text("utf-8").splitlines() if ignored.exists() else []
                if file.name not in lines:
                    ignored.write_text("\n".join([*lines, file.name, ""]), encoding="utf-8")
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"init: {error.filename!r} cannot be written: {error.strerror}; name another folder"
        ) from error


def _told(folder: Path, delivery: str, store: str) -> Iterator[str]:
    starter = STARTERS[delivery]
    server = "" if store == "sqlite" else STORES[store].text
    servers = [name for name in (starter.to_edit, server) if name]
    if servers:
        yield f"\nFirst write the URL of your {' and your '.join(servers)} into {SETTINGS}."
    yield from ("", "Then type:" if servers else "Type:", "")
    yield from (f"  {command}" for command in _commands(folder, delivery, store))
    if starter.elsewhere:
        yield from ("", "and in a second terminal:", "")
        yield from (f"  {command}" for command in [*_cd(folder), *starter.elsewhere])
    yield from ("", starter.says)


def _commands(folder: Path, delivery: str, store: str) -> Iterator[str]:
    starter, driver = STARTERS[delivery], STORES[store].driver
    # By the modules that the user needs, the package that brings each.
    needed = {"rich": "'oncely[cli]'"} | ({driver: f"'oncely[{store}]'"} if driver else {})
    needed |= starter.packages
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if missing:
        yield f"pip install {' '.join(missing)}"
    yield from _cd(folder)
    if delivery == "spark" and store != "sqlite":
        yield LOAD
    yield from starter.commands


def _cd(folder: Path) -> list[str]:
    if folder == Path():
        return []
    name = str(folder)
    return [f"cd {shlex.quote(f'./{name}' if name.startswith('-') else name)}"]
