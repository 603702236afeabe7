"""What Spark's errors say, without their plans and stacks."""

from oncely.core.errors import ConfigError, OncelyError

_CONFIG_ERROR = f"{ConfigError.__module__}.{ConfigError.__qualname__}: "


def first_line(error: Exception) -> str:
    """What a Spark error says, without its plan and its stack."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def cause_of(error: Exception) -> str:
    """The innermost line of a Spark error that says what happened."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line.startswith("oncely.") or "Error: " in line]
    # Of an error that is all of Java's, py4j begins the second line so.
    javas = [line.removeprefix(": ") for line in lines if line.startswith(": ")]
    return (*javas, *told)[-1] if javas or told else first_line(error)


def as_own(error: Exception) -> OncelyError:
    """A Spark error as ours: a ConfigError where one was raised on the driver or in a task."""
    cause = cause_of(error)
    if cause.startswith(_CONFIG_ERROR):
        return ConfigError(cause.removeprefix(_CONFIG_ERROR))
    return OncelyError(f"Spark gave up: {cause}")
