"""An API that charges once for each Idempotency-Key, however often a client repeats a request."""

import os
import uuid

from fastapi import FastAPI

import oncely
from oncely.http import IdempotencyKey

ledger = oncely.open_ledger(os.environ["ONCELY_LEDGER"])  # set by: . ./oncely.env
api = FastAPI()


@api.post("/orders/{order_id}/charge")
def charge(order_id: str) -> dict[str, str]:
    """What must not happen twice. A repeated request gets the first one's answer."""
    print(f"charging {order_id}")
    return {"receipt": str(uuid.uuid4())}


app = IdempotencyKey(api, ledger, consumer="api")
