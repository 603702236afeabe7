"""The version of the package that is installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("oncely")
except PackageNotFoundError:
    # Sources in a zip, as they are handed to a cluster, have no metadata beside them.
    __version__ = "unknown"
