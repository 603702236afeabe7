"""Senders that know nothing of oncely: by the brokers' own clients."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import boto3
import nats
import pika
import redis
from nats.js.errors import NotFoundError

from oncely.transports.url_values import read_values, text

QUEUE = "orders"
AGAIN_S = 2
"""How long brokers wait for an acknowledgement before they deliver a message again."""

Sent = Sequence[tuple[Mapping[str, Any], bytes]]
"""Headers and bodies."""


def send_to_rabbitmq(url: str, sent: Sent) -> None:
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
        channel.confirm_delivery()
        for headers, body in sent:
            properties = pika.BasicProperties(message_id=headers["message-id"], delivery_mode=2)
            channel.basic_publish("", QUEUE, body, properties)


def send_to_nats(url: str, sent: Sent) -> None:
    async def send() -> None:
        client = await nats.connect(url)
        stream = client.jetstream()
        await stream.add_stream(name=QUEUE, subjects=[f"{QUEUE}.*"])
        await stream.add_consumer(QUEUE, durable_name="oncely", ack_wait=AGAIN_S)
        for headers, body in sent:
            await stream.publish(f"{QUEUE}.made", body, headers=dict(headers))
        await client.close()

    asyncio.run(send())


def delete_stream(url: str) -> None:
    async def delete() -> None:
        client = await nats.connect(url)
        with suppress(NotFoundError):
            await client.jetstream().delete_stream(QUEUE)
        await client.close()

    asyncio.run(delete())


def send_to_redis(url: str, sent: Sent) -> None:
    with redis.Redis.from_url(url.partition("?")[0]) as client:
        for headers, body in sent:
            client.xadd(QUEUE, {**headers, "body": body})


def send_to_sqs(url: str, sent: Sent, queue: str = QUEUE, **settings: str) -> None:
    """Settings are the queue's. Of a FIFO queue, headers are arguments of `send_message`."""
    endpoint = read_values(url.partition("?")[2], {"endpoint": text})["endpoint"]
    with closing(boto3.client("sqs", region_name="eu-central-1", endpoint_url=endpoint)) as client:
        settings["VisibilityTimeout"] = str(AGAIN_S)
        at = client.create_queue(QueueName=queue, Attributes=settings)["QueueUrl"]
        for headers, body in sent:
            told = {n: {"DataType": "String", "StringValue": v} for n, v in headers.items()}
            more = headers if settings.get("FifoQueue") else {"MessageAttributes": told}
            client.send_message(QueueUrl=at, MessageBody=body.decode(), **more)


SENDERS: Mapping[str, Callable[[str, Sent], None]] = {
    "rabbitmq": send_to_rabbitmq,
    "nats": send_to_nats,
    "redis": send_to_redis,
    "sqs": send_to_sqs,
}
