"""A stream of NATS JetStream as a source."""

import asyncio
import sys

import nats

from oncely.sources import open_source


async def publish() -> None:
    """Make the stream, with one message."""
    client = await nats.connect(sys.argv[1])
    stream = client.jetstream()
    await stream.add_stream(name="orders", subjects=["orders"])
    await stream.publish("orders", headers={"Nats-Msg-Id": "order-17"})
    await client.close()


asyncio.run(publish())
source = open_source(sys.argv[1], "orders")
assert [message.id for message in source.receive(9, 1)] == ["order-17"]
source.acknowledge()
source.close()
