from .batch import landed, probe
from .delta import write_delta
from .iceberg import write_iceberg

__all__ = ["landed", "probe", "write_delta", "write_iceberg"]
