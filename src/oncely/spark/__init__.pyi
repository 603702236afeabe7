from .fronts import foreach_batch, process, register
from .report import Report
from .settings import sink_options

__all__ = ["Report", "foreach_batch", "process", "register", "sink_options"]
