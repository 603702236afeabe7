"""Delivers one webhook twice, signed as GitHub signs it."""

import hashlib
import hmac
import os
from urllib.request import Request, urlopen

body = b'{"action": "opened"}'
secret = os.environ["WEBHOOK_SECRET"].encode()  # set by: . ./oncely.env
headers = {
    "Content-Type": "application/json",
    "X-GitHub-Delivery": "72d3162e",
    "X-GitHub-Event": "issues",
    "X-Hub-Signature-256": f"sha256={hmac.new(secret, body, hashlib.sha256).hexdigest()}",
}
for _ in range(2):
    with urlopen(Request(os.environ["WEBHOOK_URL"], body, headers)) as answer:
        print(answer.status, answer.read().decode().strip())
