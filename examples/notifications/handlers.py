"""The handler of the pipeline: one notification request in, one call of the provider out."""

import provider  # Stands beside this file, in no package.

import oncely

_CHANNELS = {
    "notification.sms.send": "sms",
    "notification.email.send": "email",
    "notification.push.send": "push",
}


def notify(message: oncely.Message) -> None:
    """Send the notification that `message` asks for.

    Raises Reject where no try can help: an event that is none of ours, or nobody to send to.
    Runs under a claim only, as every consumer and pipeline gives one.
    """
    claim = message.claim
    if claim is None:
        raise RuntimeError("notify is called by a consumer or a pipeline, which hold the claim")
    channel = _CHANNELS.get(message.type)
    if channel is None:
        raise oncely.Reject("unknown event")
    to = message.get("to")
    if not to:
        raise oncely.Reject("no recipient")
    provider.send(
        channel,
        to,
        message.get("text", ""),
        message_id=message.id,
        fence=claim.fence,
        attempt=claim.attempts,
        key=message.idempotency_key,
    )
