"""The shop behind Django's runserver: settings, one view and the way to run it."""

import json
import os
import sys
from pathlib import Path

from django.core.management import execute_from_command_line
from django.http import HttpRequest, JsonResponse
from django.urls import path

ALLOWED_HOSTS = ["*"]
SECRET_KEY = "tests"
ROOT_URLCONF = "tests.http.django_shop"
MIDDLEWARE = ["django.middleware.common.CommonMiddleware", "oncely.http.DjangoIdempotencyKey"]
ONCELY = {"ledger": os.environ.get("SHOP_LEDGER", "memory://"), "consumer": "shop"}


def order(request: HttpRequest) -> JsonResponse:
    """Take an order."""
    with Path(os.environ["SHOP_EFFECTS"]).open("ab", buffering=0) as file:
        file.write(f"{json.loads(request.body)['number']}\n".encode())
    return JsonResponse({"by": os.getpid()}, status=201)


urlpatterns = [path("orders", order)]

if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.http.django_shop"
    execute_from_command_line(sys.argv)
