"""Values that every store keeps as they are."""

import unicodedata
from typing import Any

DISTINCT_IDS = (
    *("a", "A", "a ", " a", "a\t"),
    *(unicodedata.normalize(form, "é") for form in ("NFC", "NFD")),
    *("1", "01", "1.0", "\uff11"),
    *("a:b", "a|b", "a/b", "a\x1fb", "a,b", '["a","b"]'),
    *("' OR 1=1 --", "a;DROP TABLE a", "%s", "{}", "%", "_", "*", "\\", "?", ":a"),
    *("../a", "<script>", "NULL", "null"),
    *("🧾", "👩‍👩‍👧", "ß", "ss", "\u0131", "i", "İ"),
    *("\u202eabc", "abc", "a\u200bbc"),
    *("a\nb", "a\r\nb", "\x1b[31mred", "\x01", "\x7f", "\u0085x"),
    *("x" * 255, "🧾" * 255),
)
"""Ids that must stay distinct, and come back as they were written."""

JSON_VALUES: tuple[Any, ...] = (
    *(0, False, "", [], 1, True, -1.5, 1e300, 2**53 + 1, 10**30),
    *("text", "é 🧾 \u202e \x1b", 'a "quoted" \\ one'),
    *([1, [2, [3, None]]], {"a": None, "b": {"c": []}}, {"": 0, "ключ": "значение"}),
)
