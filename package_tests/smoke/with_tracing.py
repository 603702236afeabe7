"""A consumer with a span around each message; only the interface of OpenTelemetry is here."""

import oncely
from oncely.middleware import Traced

transport = oncely.open_transport("memory://shop")
transport.publish("orders", [oncely.Message("order-17")])
consumer = oncely.Consumer("memory://shop", "orders").middleware(Traced())
assert consumer.consume(lambda message: None, drain=True).handled == 1
