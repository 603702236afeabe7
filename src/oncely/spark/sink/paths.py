"""The places in options: made absolute, so that every process finds them, and checked for their
use.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import permutations
from os.path import normpath
from pathlib import Path
from tempfile import TemporaryFile
from uuid import uuid4

from oncely.core.errors import ConfigError, mask_passwords
from oncely.locations import absolute, absolute_location, read_secret

_FOLDERS = ("quarantine", "archive", "handler_path", "staging")
_LOCATIONS = ("ledger", "transport")
_HADOOPS_OWN = ("s3a://", "s3n://")


def absolute_paths(options: Mapping[str, str]) -> dict[str, str]:
    """The sink's options, with relative paths made absolute by this process's working directory.
    This must be the driver: other processes have other directories.

    Raises ConfigError for a sqlite URL without a file.
    """
    options = {"quarantine": "oncely-quarantine", **options}
    folders = {name: absolute(options[name]) for name in _FOLDERS if options.get(name)}
    kind, _, path = options.get("table", "").partition(":")
    if kind == "delta" and path:
        folders["table"] = f"delta:{absolute(path)}"
    locations = {}
    for name in _LOCATIONS:
        if options.get(name):
            locations[name] = absolute_location(options[name])
            # The driver need not have the executors' secrets.
            with suppress(ConfigError):
                url = read_secret(locations[name], "")
                if url.startswith("sqlite:"):
                    locations[name] = absolute_location(url)
    return {**options, **folders, **locations}


def check_apart(places: Mapping[str, str | None]) -> None:
    """Raise ConfigError for a place that is the same as another one, or in its folder: who reads or
    empties the one would meet the other. `places` are absolute paths, and URIs.
    """
    at = {
        name: (place if "://" in place else normpath(place)).rstrip("/") + "/"
        for name, place in places.items()
        if place
    }
    for (name, place), (other, folder) in permutations(at.items(), 2):
        if place.startswith(folder):
            shown = mask_passwords(place.rstrip("/"))
            raise ConfigError(f"{name}: {shown!r} is in the folder of {other}; name one beside it")


def check_writable(folder: str) -> None:
    """Create a folder, by a path or a URI that Arrow knows, and write into it.

    Raises ConfigError if that fails.
    """
    try:
        if "://" in folder:
            _write_with_arrow(folder)
        else:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise ConfigError(f"{mask_passwords(folder)!r} cannot be written: {reason}") from error


@lru_cache(maxsize=8)
def check_quarantine(folder: str) -> None:
    """Raise ConfigError if this machine, which may not be the driver's, cannot write to the
    quarantine. Checked once in each process.
    """
    try:
        check_writable(folder)
    except ConfigError as error:
        raise ConfigError(f"option quarantine: {error}") from None


def check_scheme(folder: str) -> None:
    """Raise ConfigError for a URI that only Spark itself knows."""
    if folder.startswith(_HADOOPS_OWN):
        raise ConfigError(f"{mask_passwords(folder)!r} cannot be opened; write s3:// here")


def _write_with_arrow(folder: str) -> None:
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem

    check_scheme(folder)
    try:
        files, path = FileSystem.from_uri(folder)
    except ArrowException as error:
        raise ConfigError(
            f"{mask_passwords(folder)!r} cannot be opened: {str(error).splitlines()[0]}; write a "
            "path, or a URI with s3://, gs://, abfss:// or hdfs://"
        ) from error
    probe = f"{path}/.oncely-{uuid4().hex}"
    files.create_dir(path, recursive=True)
    files.open_output_stream(probe).close()
    files.delete_file(probe)
