"""A message as text: all but its body, in one JSON object."""

import json
from datetime import datetime

from oncely.core.message import Message


def encode(message: Message) -> str:
    """Everything about `message` but its body. Pure ASCII, whatever is in it."""
    return json.dumps(
        {
            "id": message.id,
            "type": message.type,
            "headers": dict(message.headers),
            "source": message.source,
            "time": message.time and message.time.isoformat(),
            "content_type": message.content_type,
            "key": message.key,
        }
    )


def decode(envelope: str, body: bytes) -> Message:
    """The message that was encoded, with its body."""
    fields = json.loads(envelope)
    time = fields.pop("time")
    return Message(body=body, time=time and datetime.fromisoformat(time), **fields)
