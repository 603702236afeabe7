"""Queues of Amazon SQS as sources. Credentials are found as boto3 finds them."""

from collections.abc import Sequence
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from oncely.core.errors import TransportError
from oncely.core.message import Message
from oncely.sources.messages import sqs_message, transport_errors
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
        return [sqs_message(each) for each in self._batch]

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
