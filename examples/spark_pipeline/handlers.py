"""The handler: one message in, one letter out. It runs in processes of Spark."""

import os
from pathlib import Path

import oncely

LETTERS = Path(__file__).parent / "out" / "letters.txt"


def send_letter(message: oncely.Message) -> None:
    """Append a line in one write, so that lines of several processes never mix."""
    letters = os.open(LETTERS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(letters, f"{message.id} {message.get('to')}\n".encode())
    finally:
        os.close(letters)
