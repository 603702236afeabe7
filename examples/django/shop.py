"""Charges over HTTP in a Django project of one file: a request that is sent again charges nothing.

`python shop.py runserver` serves it, and so does `gunicorn shop:application`.
"""

import sys
from pathlib import Path

from django.conf import settings
from django.core.management import execute_from_command_line
from django.core.wsgi import get_wsgi_application
from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.http import require_POST

import oncely

OUT = Path(__file__).parent / "out"
DATABASE = OUT / "shop.db"

OUT.mkdir(exist_ok=True)
ledger = oncely.open_ledger(f"sqlite:///{DATABASE}")
ledger.migrate()

settings.configure(
    ALLOWED_HOSTS=["127.0.0.1"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": DATABASE}},
    MIDDLEWARE=["oncely.http.DjangoIdempotencyKey"],
    ONCELY={"ledger": ledger, "consumer": "shop", "required": True},
    ROOT_URLCONF=__name__,
    SECRET_KEY="example",
)


def charge(request: HttpRequest) -> JsonResponse:
    """The row and the note that the request is handled are one commit."""
    with (
        transaction.atomic(),
        request.oncely.transaction(connection),
        connection.cursor() as cursor,
    ):
        cursor.execute("INSERT INTO charges VALUES (%s)", [request.POST["customer"]])
        cursor.execute("SELECT count(*) FROM charges")
        [count] = cursor.fetchone()
    return JsonResponse({"charge": count}, status=201)


urlpatterns = [path("charges", require_POST(charge))]
application = get_wsgi_application()

with connection.cursor() as opened:
    opened.execute("CREATE TABLE IF NOT EXISTS charges (customer TEXT)")

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
