"""The shop behind Django's runserver: settings, one view and the way to run it."""

import json
import os
import sys
from pathlib import Path

from django.core.management import execute_from_command_line
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from oncely.http import github, webhook
from oncely.ledger import open_ledger

ALLOWED_HOSTS = ["*"]
SECRET_KEY = "tests"
ROOT_URLCONF = "tests.http.django_shop"
MIDDLEWARE = [
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "oncely.http.DjangoIdempotencyKey",
]
ONCELY = {"ledger": os.environ.get("SHOP_LEDGER", "memory://"), "consumer": "shop"}


def order(request: HttpRequest) -> JsonResponse:
    """Take an order."""
    with Path(os.environ["SHOP_EFFECTS"]).open("ab", buffering=0) as file:
        file.write(f"{json.loads(request.body)['number']}\n".encode())
    return JsonResponse({"by": os.getpid()}, status=201)


_hook = webhook(open_ledger(ONCELY["ledger"]), queue="hooks", verify=github("secret"))


@csrf_exempt  # type: ignore[untyped-decorator]
def hooks(request: HttpRequest) -> HttpResponse:
    """Take a delivery of GitHub, by the endpoint's function."""
    answer = _hook.receive(request.method, request.headers, request.body)
    return HttpResponse(answer.body, status=answer.status, headers=dict(answer.fields))


# Orders come from clients without cookies, too.
urlpatterns = [path("orders", csrf_exempt(order)), path("hooks", hooks)]

if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.http.django_shop"
    execute_from_command_line(sys.argv)
