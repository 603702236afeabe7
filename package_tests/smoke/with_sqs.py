"""A queue of Amazon SQS as a source."""

import os
import sys

import boto3

from oncely.sources import open_source

os.environ |= {"AWS_ACCESS_KEY_ID": "1", "AWS_SECRET_ACCESS_KEY": "1"}
endpoint = sys.argv[1].partition("endpoint=")[2]
sqs = boto3.client("sqs", region_name="eu-central-1", endpoint_url=endpoint)
url = sqs.create_queue(QueueName="orders")["QueueUrl"]
sent = sqs.send_message(QueueUrl=url, MessageBody="{}")
source = open_source(sys.argv[1], "orders")
assert [message.id for message in source.receive(9, 1)] == [sent["MessageId"]]
source.acknowledge()
source.close()
