"""The adapter for Dramatiq, with its broker for tests; and its broker for RabbitMQ is there."""

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.stub import StubBroker

import oncely
from oncely.adapters.dramatiq import OnceMiddleware

assert RabbitmqBroker is not None
ledger = oncely.open_ledger("memory://")
ledger.migrate()
broker = StubBroker()
broker.add_middleware(OnceMiddleware(ledger))
charged: list[int] = []


@dramatiq.actor(broker=broker)
def charge(order: int) -> None:
    """Count the order."""
    charged.append(order)


broker.enqueue(charge.send(17))
worker = dramatiq.Worker(broker, worker_timeout=100)
worker.start()
broker.join("default")
worker.stop()
assert charged == [17]
