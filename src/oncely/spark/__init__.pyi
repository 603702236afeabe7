from .fronts import foreach_batch, process, register
from .option_values import sink_options
from .sink.counts import Report
from .stream_counts import StreamCounts

__all__ = ["Report", "StreamCounts", "foreach_batch", "process", "register", "sink_options"]
