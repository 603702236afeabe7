"""Letters over HTTP: a request that is sent again gets the first answer, and sends no letter."""

from pathlib import Path

from flask import Flask, g, request

import oncely
from oncely.http import WsgiIdempotencyKey

OUT = Path(__file__).parent / "out"
LETTERS = OUT / "letters.txt"

OUT.mkdir(exist_ok=True)
ledger = oncely.open_ledger(f"sqlite:///{OUT / 'ledger.db'}")
ledger.migrate()

app = Flask(__name__)
app.wsgi_app = WsgiIdempotencyKey(  # type: ignore[method-assign]
    app.wsgi_app, ledger, consumer="shop", required=True
)


@app.post("/letters")
def send_letter() -> tuple[dict[str, str], int]:
    """Ask for a letter; the key lets whoever delivers it refuse a copy, too."""
    customer = request.get_json()["customer"]
    with LETTERS.open("a") as letters:
        letters.write(f"{g.oncely.key} {customer}\n")
    return {"letter": f"to {customer}"}, 201
