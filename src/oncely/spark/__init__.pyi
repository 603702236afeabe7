from .fronts import StreamCounts, foreach_batch, process, register
from .option_values import sink_options
from .sink.counts import Report

__all__ = ["Report", "StreamCounts", "foreach_batch", "process", "register", "sink_options"]
