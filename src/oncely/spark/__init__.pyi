from .fronts import foreach_batch, process, register
from .settings import sink_options
from .spark_report import Report

__all__ = ["Report", "foreach_batch", "process", "register", "sink_options"]
