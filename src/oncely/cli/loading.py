"""The consumer that module:consumer names: imported, and its mistakes told in one line each."""

import argparse
import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

import oncely
from oncely.cli.ledger_arguments import opened, opened_transport
from oncely.consumer import Consumer
from oncely.core.errors import ConfigError

_LIBRARIES = (str(Path(oncely.__file__).parent), "site-packages", "<frozen ")


@contextmanager
def loaded_consumer(parsed: argparse.Namespace, *, only_look: bool = False) -> Iterator[Consumer]:
    """The consumer, with the ledger and the transport that were typed, else its own; only to look
    at, as `opened_transport` says.
    """
    consumer = load_consumer(parsed.consumer)
    with ExitStack() as stack:
        if parsed.ledger is not None:
            consumer.redirect(ledger=stack.enter_context(opened(parsed)))
        if parsed.transport is not None:
            transport = opened_transport(parsed, only_look=only_look)
            consumer.redirect(transport=stack.enter_context(transport))
        yield consumer


def load_consumer(name: str) -> Consumer:
    """The Consumer at module:name, where a module of the current folder comes first.

    Raises ConfigError.
    """
    module_name, colon, attribute = name.partition(":")
    if not module_name or not colon or not attribute:
        raise ConfigError(f'{name!r} names no consumer; write "module:consumer"')
    module = _module(module_name)
    if not hasattr(module, attribute):
        raise ConfigError(f"{module_name} has no {attribute!r}{_instead(module)}")
    consumer = getattr(module, attribute)
    if not isinstance(consumer, Consumer):
        kind = type(consumer).__name__
        raise ConfigError(f"{name} is of type {kind} and no oncely.Consumer{_instead(module)}")
    return consumer


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
    """The line of the user's code that has failed, and not one of a library."""
    if isinstance(error, SyntaxError):
        return ""  # It says so itself.
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in _LIBRARIES)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _instead(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, Consumer)]
    return f"; did you mean {module.__name__}:{names[0]}?" if names else ""
