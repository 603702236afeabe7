from .answers import HttpAnswer
from .asgi import IdempotencyKey
from .calls import idempotency_headers, keyed
from .django import DjangoIdempotencyKey
from .http_request import HttpRequest
from .key_options import KeyOptions
from .problems import Problem, acp_json, problem_json
from .request_state import RequestState
from .signatures import (
    SignatureError,
    Verifier,
    body_id,
    github,
    header_id,
    hmac_sha256,
    shopify,
    slack,
    standard_webhooks,
    stripe,
)
from .webhooks import Webhook, webhook
from .wsgi import WsgiIdempotencyKey

__all__ = [
    "DjangoIdempotencyKey",
    "HttpAnswer",
    "HttpRequest",
    "IdempotencyKey",
    "KeyOptions",
    "Problem",
    "RequestState",
    "SignatureError",
    "Verifier",
    "Webhook",
    "WsgiIdempotencyKey",
    "acp_json",
    "body_id",
    "github",
    "header_id",
    "hmac_sha256",
    "idempotency_headers",
    "keyed",
    "problem_json",
    "shopify",
    "slack",
    "standard_webhooks",
    "stripe",
    "webhook",
]
