"""Imports the consumer, or the probe, that module:name names; each error is one line."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import oncely
from oncely.cli.opening import opened, opened_transport
from oncely.cli.options import LedgerName
from oncely.consumer.consumer import Consumer
from oncely.core.errors import ConfigError
from oncely.core.policy import Probe

_LIBRARIES = (str(Path(oncely.__file__).parent), "site-packages", "<frozen ")


@contextmanager
def loaded_consumer(name: str, ledger: LedgerName, transport: str | None) -> Iterator[Consumer]:
    """The consumer, with that ledger and that transport if they are named, else its own."""
    consumer = load_consumer(name)
    with ExitStack() as stack:
        if ledger.url is not None:
            consumer.redirect(ledger=stack.enter_context(opened(ledger)))
        if transport is not None:
            consumer.redirect(transport=stack.enter_context(opened_transport(transport)))
        yield consumer


def load_consumer(name: str) -> Consumer:
    """The Consumer at module:name, where a module of the current folder comes first.

    Raises ConfigError.
    """
    module, consumer = _loaded(name, "consumer")
    if not isinstance(consumer, Consumer):
        kind = type(consumer).__name__
        raise ConfigError(f"{name} is of type {kind}, not an oncely.Consumer{_instead(module)}")
    return consumer


def load_probe(name: str) -> Probe:
    """The probe at module:function, found as a consumer is. Raises ConfigError."""
    _, probe = _loaded(name, "function")
    if not callable(probe) or inspect.iscoroutinefunction(probe):
        raise ConfigError(f"{name} is not a probe; write a function of a message, without async")
    found: Probe = probe
    return found


def _loaded(name: str, what: str) -> tuple[ModuleType, Any]:
    module_name, colon, attribute = name.partition(":")
    if not module_name or not colon or not attribute:
        raise ConfigError(f'{name!r} names no {what}; write "module:{what}"')
    module = _module(module_name)
    if not hasattr(module, attribute):
        instead = _instead(module) if what == "consumer" else ""
        raise ConfigError(f"{module_name} has no {attribute!r}{instead}")
    return module, getattr(module, attribute)


def _module(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{name} cannot be imported: {error}{_where(error)}") from error
        raise ConfigError(
            f"there is no module {error.name!r}, neither in {folder} nor installed"
        ) from error
    except (Exception, SystemExit) as error:
        # Importing runs the user's own code, which may raise anything.
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{name} cannot be imported: {said}{_where(error)}") from error


def _where(error: BaseException) -> str:
    """The line of the user's code that failed, not of a library."""
    if isinstance(error, SyntaxError):
        return ""  # Its message has the line.
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in _LIBRARIES)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _instead(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, Consumer)]
    return f"; did you mean {module.__name__}:{names[0]}?" if names else ""
