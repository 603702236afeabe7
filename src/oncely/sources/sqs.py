"""Queues of Amazon SQS as sources. Credentials are found as boto3 finds them."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from oncely.core.errors import TransportError
from oncely.core.message import Message
from oncely.sources.reading import read_message, transport_errors
from oncely.transports.url_values import read_values, text

_ALL = {"MessageSystemAttributeNames": ["All"], "MessageAttributeNames": ["All"]}


class SqsSource:
    """A queue by its name, at sqs://REGION; the URL's `endpoint` replaces Amazon's."""

    def __init__(self, url: str, queue: str) -> None:
        address, _, options = url.partition("?")
        at = read_values(options, {"endpoint": text}).get("endpoint")
        with transport_errors(BotoCoreError):
            region = address.partition("://")[2] or None
            self._sqs = boto3.client("sqs", region_name=region, endpoint_url=at)
        self._queue, self._url, self._batch = queue, "", list[Any]()

    def receive(self, max_messages: int, wait_s: float) -> Sequence[Message]:
        self._batch = []
        while count := min(10, max_messages - len(self._batch)):
            wait = {"WaitTimeSeconds": 0 if self._batch else min(20, round(wait_s))}
            answer = self._call("receive_message", MaxNumberOfMessages=count, **wait, **_ALL)
            if "Messages" not in answer:
                break
            self._batch += answer["Messages"]
        return [_message(each) for each in self._batch]

    def acknowledge(self) -> None:
        for at in range(0, len(self._batch), 10):
            handles = [each["ReceiptHandle"] for each in self._batch[at : at + 10]]
            entries = [{"Id": str(n), "ReceiptHandle": each} for n, each in enumerate(handles)]
            if failed := self._call("delete_message_batch", Entries=entries).get("Failed"):
                raise TransportError(f"SQS has not deleted {len(failed)}: {failed[0]}")

    def is_drained(self) -> bool:
        counts = self._call("get_queue_attributes", AttributeNames=["All"])["Attributes"]
        names = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible")
        return not any(int(counts[name]) for name in names)

    def close(self) -> None:
        self._sqs.close()

    def _call(self, name: str, **arguments: Any) -> Any:
        with transport_errors(BotoCoreError, ClientError):
            self._url = self._url or self._sqs.get_queue_url(QueueName=self._queue)["QueueUrl"]
            return getattr(self._sqs, name)(QueueUrl=self._url, **arguments)


def _message(raw: Mapping[str, Any]) -> Message:
    system, body = raw["Attributes"], raw["Body"].encode()
    group, own_id = system.get("MessageGroupId"), system.get("MessageDeduplicationId")
    headers = {
        name: value.get("StringValue") or b64encode(value.get("BinaryValue", b"")).decode()
        for name, value in raw.get("MessageAttributes", {}).items()
    }
    # A hash of the body is the same for other messages. Groups may have ids of their own.
    is_own = own_id and own_id != sha256(body).hexdigest()
    given_id = f"{group}/{own_id}" if is_own else raw["MessageId"]
    time = datetime.fromtimestamp(int(system["SentTimestamp"]) / 1_000, UTC)
    return read_message(given_id, body, headers, time, key=group)
