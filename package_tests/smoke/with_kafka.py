"""A consumer on Kafka."""

import sys

import oncely

ledger = oncely.open_ledger("memory://")
ledger.migrate()
transport = oncely.open_transport(sys.argv[1])
transport.publish("orders", [oncely.Message("order-17")] * 2)
transport.close()
consumer = oncely.Consumer(sys.argv[1], "orders").idempotent(ledger, "billing")
report = consumer.consume(lambda message: None, drain=True)
assert (report.handled, report.duplicates) == (1, 1), report
