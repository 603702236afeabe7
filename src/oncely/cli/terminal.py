"""Text for a terminal."""

from oncely.core.shown import shown


def shortened(text: str, limit: int = 200) -> str:
    """`text` in printable characters, at most `limit` of them."""
    return shown(text if len(text) <= limit else f"{text[: limit - 1]}…")
