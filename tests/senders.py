"""Senders that know nothing of oncely: by the brokers' own clients. Each makes the queue."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import boto3
import nats
import redis

from oncely import Message, open_transport

AGAIN_S = 2
"""How long brokers wait for an acknowledgement before they deliver a message again."""

Sent = Sequence[tuple[Mapping[str, Any], bytes]]
"""Headers and bodies."""


def send_to_rabbitmq(url: str, queue: str, sent: Sent) -> None:
    with closing(open_transport(url)) as transport:
        transport.publish(queue, [Message(told["message-id"], body) for told, body in sent])


def send_to_nats(url: str, queue: str, sent: Sent) -> None:
    async def send() -> None:
        client = await nats.connect(url)
        stream = client.jetstream()
        await stream.add_stream(name=queue, subjects=[queue])
        await stream.add_consumer(queue, durable_name="oncely", ack_wait=AGAIN_S)
        for headers, body in sent:
            await stream.publish(queue, body, headers=dict(headers))
        await client.close()

    asyncio.run(send())


def send_to_redis(url: str, queue: str, sent: Sent) -> None:
    with redis.Redis.from_url(url.partition("?")[0]) as client:
        for headers, body in sent:
            client.xadd(queue, {**headers, "body": body})


def send_to_sqs(url: str, queue: str, sent: Sent, **settings: str) -> None:
    """Settings are the queue's. To a FIFO queue, headers are arguments of `send_message`."""
    endpoint = url.partition("endpoint=")[2]
    with closing(boto3.client("sqs", region_name="eu-central-1", endpoint_url=endpoint)) as client:
        settings["VisibilityTimeout"] = str(AGAIN_S)
        at = client.create_queue(QueueName=queue, Attributes=settings)["QueueUrl"]
        for headers, body in sent:
            told = {n: {"DataType": "String", "StringValue": v} for n, v in headers.items()}
            more = headers if "FifoQueue" in settings else {"MessageAttributes": told}
            client.send_message(QueueUrl=at, MessageBody=body.decode(), **more)


SENDERS: Mapping[str, Callable[[str, str, Sent], None]] = {
    "rabbitmq": send_to_rabbitmq,
    "nats": send_to_nats,
    "redis": send_to_redis,
    "sqs": send_to_sqs,
}
