from .chain import BothWays, CallNext, Middleware
from .idempotency import Idempotent
from .logging import Logged
from .metering import Measured
from .rate_limit import RateLimited
from .timeout import TimeLimit
from .tracing import Traced

__all__ = [
    "BothWays",
    "CallNext",
    "Idempotent",
    "Logged",
    "Measured",
    "Middleware",
    "RateLimited",
    "TimeLimit",
    "Traced",
]
