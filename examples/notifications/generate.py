"""Writes a day of notification requests as a broker may deliver them: late, doubled, some broken.

One JSON line is one delivery. The same arguments give the same bytes. Beside the folder of the
messages stands what is in it, counted: `messages.expected.json`.
"""

import argparse
import json
import random
import re
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

FILES = 8
DUPLICATES_PERCENT = 10
BROKEN_PERCENT = 1
LATE_PERCENT = 2
MAX_ID_LENGTH = 255

Fields = dict[str, Any]


class Delivery(NamedTuple):
    """One arrival: a line of a file."""

    order_s: float
    """Where it stands among the others."""
    line: bytes
    good: bool = True


class Stream(NamedTuple):
    """The deliveries, file by file, and what the pipeline must make of them."""

    files: list[list[Delivery]]
    unique: int
    duplicates: int
    broken: Counter[str]
    """By the reason that the pipeline reports."""

    @property
    def deliveries(self) -> int:
        """All of them."""
        return sum(len(file) for file in self.files)


# What is sent, by template and language: a title and a text.
TEXTS = {
    "login.code": {
        "en-GB": ("Your code", "{code} is your login code. Never share it."),
        "de-DE": ("Dein Code", "{code} ist dein Anmeldecode. Gib ihn nie weiter."),
        "fr-FR": ("Votre code", "{code} est votre code d'accès. Ne le partagez jamais."),
        "es-ES": ("Tu código", "{code} es tu código de acceso. No lo compartas nunca."),
    },
    "order.shipped": {
        "en-GB": ("On its way", "Hello {name}, your parcel {code} is on its way."),
        "de-DE": ("Unterwegs", "Hallo {name}, dein Päckchen {code} ist unterwegs."),
        "fr-FR": ("En route", "Bonjour {name}, votre colis {code} a été expédié."),
        "es-ES": ("En camino", "Hola, {name}: tu paquete {code} está en camino."),
    },
    "payment.receipt": {
        "en-GB": ("Your receipt", "Dear {name}, we have received your payment {code}. Thank you."),
        "de-DE": ("Dein Beleg", "Hallo {name}, deine Zahlung {code} ist eingegangen. Danke schön."),
        "fr-FR": ("Votre reçu", "Bonjour {name}, nous avons bien reçu le paiement {code}. Merci."),
        "es-ES": ("Tu recibo", "Hola, {name}: hemos recibido tu pago {code}. ¡Gracias!"),
    },
    "newsletter.weekly": {
        "en-GB": ("New this week", "Hello {name}, twelve new arrivals are waiting for you."),
        "de-DE": ("Neu im Laden", "Hallo {name}, zwölf Neuheiten warten auf dich."),
        "fr-FR": ("Nouveautés", "Bonjour {name}, douze nouveautés vous attendent à la boutique."),
        "es-ES": ("Novedades", "Hola, {name}: doce novedades de la temporada te esperan."),
    },
}
LOCALES = ["en-GB", "de-DE", "fr-FR", "es-ES"]
NAMES = ["Anna", "Björn", "Chloé", "Darío", "Élise", "Freya", "Íñigo", "Jürgen", "Zoë", "李娜"]
PRIORITIES = {"login.code": "high", "newsletter.weekly": "low"}
CHANNELS = {
    "sms": ["login.code", "login.code", "order.shipped"],
    "email": ["payment.receipt", "order.shipped", "newsletter.weekly"],
    "push": ["order.shipped", "login.code", "newsletter.weekly"],
}
CHANNEL_WEIGHTS = [45, 35, 20]
# How busy each hour is: quiet at night, two peaks, before noon and in the evening.
MORNING_WEIGHTS = [4, 2, 1, 1, 1, 2, 6, 14, 22, 28, 34, 30]
HOUR_WEIGHTS = [*MORNING_WEIGHTS, 26, 24, 24, 24, 26, 28, 34, 38, 32, 22, 14, 8]


def generate(count: int, seed: int, day: datetime) -> Stream:
    """A stream of `count` deliveries of messages that were created on `day`."""
    rng = random.Random(seed)
    copies, flaws = count * DUPLICATES_PERCENT // 100, count * BROKEN_PERCENT // 100
    redelivered, moved = (copies + 1) // 3, copies // 3
    unique = count - copies - flaws
    firsts = [_fields(rng, day) for _ in range(unique)]
    again = [_redelivered(rng, fields) for fields in rng.choices(firsts, k=redelivered)]
    rows = [_delivery(rng, day, fields) for fields in firsts + again]
    broken: Counter[str] = Counter()
    for number in range(flaws):
        reason, spoil = FLAWS[number % len(FLAWS)]
        broken[reason] += 1
        fields = _fields(rng, day)
        order_s = _delivery(rng, day, fields).order_s
        rows.append(Delivery(order_s, spoil(rng, fields), good=False))
    files = _split(sorted(rows))
    _copy(rng, files, copies - redelivered - moved, moved)
    return Stream(files, unique, copies, broken)


def _fields(rng: random.Random, day: datetime) -> Fields:
    """A good message, as it is delivered for the first time."""
    hour = rng.choices(range(24), HOUR_WEIGHTS)[0]
    created = day + timedelta(hours=hour, seconds=rng.uniform(0, 3600))
    late = rng.randrange(100) < LATE_PERCENT
    delay_s = rng.uniform(600, 21_600) if late else 0.02 + rng.expovariate(2.5)
    channel = rng.choices(list(CHANNELS), CHANNEL_WEIGHTS)[0]
    return {
        "id": str(uuid.UUID(int=rng.getrandbits(128), version=4)),
        "event": f"notification.{channel}.send",
        "created_at": _iso(created),
        "delivered_at": _iso(created + timedelta(seconds=delay_s)),
        "payload": _payload(rng, channel),
    }


def _payload(rng: random.Random, channel: str) -> Fields:
    template, locale = rng.choice(CHANNELS[channel]), rng.choice(LOCALES)
    title, text = TEXTS[template][locale]
    name, code = rng.choice(NAMES), f"{rng.randrange(1_000_000):06}"
    return {
        "to": _recipient(rng, channel),
        "template": template,
        "locale": locale,
        "priority": PRIORITIES.get(template, "normal"),
        "text": text.format(name=name, code=code),
        **_extras(channel, title),
    }


def _recipient(rng: random.Random, channel: str) -> str:
    """Somebody who does not exist: numbers and domains are among those kept free for stories."""
    if channel == "sms":
        return f"+447700900{rng.randrange(1000):03}"
    if channel == "email":
        return f"customer.{rng.randrange(1_000_000)}@example.com"
    return f"{rng.getrandbits(256):064x}"


def _extras(channel: str, title: str) -> Fields:
    """What only this channel has."""
    if channel == "sms":
        return {"sender": "Example"}
    if channel == "email":
        return {"subject": title}
    return {"title": title, "ttl_s": 3600}


def _redelivered(rng: random.Random, fields: Fields) -> Fields:
    """The same message again, from half a minute to half an hour later."""
    former = datetime.fromisoformat(fields["delivered_at"])
    return fields | {"delivered_at": _iso(former + timedelta(seconds=rng.uniform(30, 1800)))}


def _delivery(rng: random.Random, day: datetime, fields: Fields) -> Delivery:
    """The line of these fields. A few overtake others, as they do between partitions."""
    order_s = (datetime.fromisoformat(fields["delivered_at"]) - day).total_seconds()
    if rng.randrange(20) == 0:
        order_s += rng.gauss(0, 20)
    return Delivery(order_s, _line(fields))


def _split(rows: list[Delivery]) -> list[list[Delivery]]:
    """Equal parts, in order."""
    ends = [len(rows) * part // FILES for part in range(FILES + 1)]
    return [rows[start:end] for start, end in pairwise(ends)]


def _copy(rng: random.Random, files: list[list[Delivery]], same: int, other: int) -> None:
    """Put exact copies of good lines at any place of their own file, and of another one."""
    good = [(part, row) for part, file in enumerate(files) for row in file if row.good]
    chosen = rng.choices(good, k=same + other)
    for number, (part, row) in enumerate(chosen):
        shift = 0 if number < same else rng.randrange(1, FILES)
        file = files[(part + shift) % FILES]
        file.insert(rng.randrange(len(file) + 1), row)


def _iso(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _line(fields: Fields) -> bytes:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


# The flaws: each takes a good message and gives the line of a broken one.


def _without_id(_rng: random.Random, fields: Fields) -> bytes:
    return _line({name: value for name, value in fields.items() if name != "id"})


def _null_id(_rng: random.Random, fields: Fields) -> bytes:
    return _line(fields | {"id": None})


def _empty_id(_rng: random.Random, fields: Fields) -> bytes:
    return _line(fields | {"id": ""})


def _blank_id(rng: random.Random, fields: Fields) -> bytes:
    return _line(fields | {"id": rng.choice([" ", "   ", "\t", " \n", "\u00a0\u2003"])})


def _long_id(rng: random.Random, fields: Fields) -> bytes:
    length = rng.choice([MAX_ID_LENGTH + 1, 300, 1000])
    return _line(fields | {"id": (fields["id"] * length)[:length]})


def _nul_in_id(_rng: random.Random, fields: Fields) -> bytes:
    return _line(fields | {"id": fields["id"][:8] + "\0" + fields["id"][8:]})


def _truncated(rng: random.Random, fields: Fields) -> bytes:
    text = _line(fields).decode()
    return text[: rng.randrange(10, len(text))].encode()


def _not_json(rng: random.Random, fields: Fields) -> bytes:
    time = fields["delivered_at"]
    lines = [
        f"{time} ERROR upstream request timed out after 30 s",
        f"{fields['id']};{fields['event']};{time}",
        "<html><head><title>502 Bad Gateway</title></head></html>",
    ]
    return rng.choice(lines).encode()


def _not_utf8(rng: random.Random, fields: Fields) -> bytes:
    """Outside of a string: inside, a reader may put a replacement character and go on."""
    return _line(fields).replace(b",", rng.choice([b",\xff\xfe", b",\xc3", b"\x80,"]), 1)


def _nobody(rng: random.Random, fields: Fields) -> bytes:
    """Sound in form, and of no use to the handler."""
    payload = {name: value for name, value in fields["payload"].items() if name != "to"}
    return _line(fields | {"payload": payload | rng.choice([{}, {"to": None}, {"to": ""}])})


Flaw = Callable[[random.Random, Fields], bytes]
FLAWS: list[tuple[str, Flaw]] = [
    # the pipeline's reason, and what is wrong
    ("missing id", _without_id),
    ("missing id", _null_id),
    ("empty id", _empty_id),
    ("empty id", _blank_id),
    ("too long id", _long_id),
    ("id with NUL", _nul_in_id),
    ("not json", _truncated),
    ("not json", _not_json),
    ("not json", _not_utf8),
    ("no recipient", _nobody),
]


def expected_path(out: Path) -> Path:
    """Where the counts stand: beside the folder, so that no reader takes them for messages."""
    return out.with_name(f"{out.name}.expected.json")


def write(stream: Stream, seed: int, out: Path) -> None:
    """Write the stream, in place of an earlier one.

    However it is interrupted, no file is there half written, and where the counts are, all is.
    Raises ValueError where `out` holds what was not written here.
    """
    _check_ours(out)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # Of a run that was killed.
    partial.mkdir(parents=True)
    try:
        _write_files(stream, partial / "messages")
        counts = json.dumps(_counts(stream, seed), indent=2) + "\n"
        (partial / "expected.json").write_text(counts, encoding="utf-8")
        expected_path(out).unlink(missing_ok=True)
        if out.exists():
            out.rename(partial / "former")
        (partial / "messages").rename(out)
        (partial / "expected.json").rename(expected_path(out))
    finally:
        shutil.rmtree(partial)


def _check_ours(out: Path) -> None:
    """Only what was written here is ever replaced."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is not a folder; choose another --out")
    for path in out.iterdir():
        if not re.fullmatch(r"notifications-\d\d\.jsonl", path.name):
            raise ValueError(f"{path} was not generated here; move it, or choose another --out")


def _write_files(stream: Stream, folder: Path) -> None:
    folder.mkdir()
    for number, file in enumerate(stream.files):
        path = folder / f"notifications-{number:02}.jsonl"
        path.write_bytes(b"".join(row.line + b"\n" for row in file))
        _say(f"  {path.name}: {len(file):,} deliveries")


def _counts(stream: Stream, seed: int) -> Fields:
    return {
        "seed": seed,
        "deliveries": stream.deliveries,
        "unique": stream.unique,
        "duplicates": stream.duplicates,
        "broken": dict(stream.broken),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return count


def _day(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate as the arguments say; 0 when done, 2 (by argparse) when they are wrong."""
    parser = argparse.ArgumentParser(description="Write a day of notification requests.")
    out = Path(__file__).resolve().parent / "messages"
    parser.add_argument("--count", type=_count, default=50_000, help="deliveries in all")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--day", type=_day, default="2026-11-20", help="of creation, in UTC")
    parser.add_argument("--out", type=Path, default=out, help="the folder to write")
    options = parser.parse_args(arguments)
    _say(f"generating {options.count:,} deliveries")
    stream = generate(options.count, options.seed, options.day)
    try:
        write(stream, options.seed, options.out.absolute())
    except ValueError as error:
        parser.error(str(error))
    _say(
        f"{options.out.name}: {stream.deliveries:,} deliveries: {stream.unique:,} messages, "
        f"{stream.duplicates:,} duplicates, {stream.broken.total():,} broken"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
