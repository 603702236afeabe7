"""What the tests of dead letters look at."""

from oncely.transports.transport import Transport


def waiting(transport: Transport) -> list[str]:
    """The ids of what was put back."""
    return [delivery.message.id for delivery in transport.receive("orders", 100, 0)]
