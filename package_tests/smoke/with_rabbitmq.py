"""A consumer on RabbitMQ."""

import sys

import oncely
from oncely.adapters.pika import once_callback

ledger = oncely.open_ledger("memory://")
ledger.migrate()
transport = oncely.open_transport(sys.argv[1])
transport.publish("orders", [oncely.Message("order-17")] * 2)
transport.close()
consumer = oncely.Consumer(sys.argv[1], "orders").idempotent(ledger, "billing")
report = consumer.consume(lambda message: None, drain=True)
assert (report.handled, report.duplicates) == (1, 1), report
assert callable(once_callback(ledger, "billing", lambda message: None))
