"""Chance that nobody else can repeat."""

import os
from random import SystemRandom

CHANCE = SystemRandom()
"""The system's random numbers, never those of the `random` module: a program that seeds that, as
many do to make their runs repeatable, would make two workers take the same numbers, and each hold
the other's claim for its own. Nor are numbers taken from the program's own sequence.
"""


def new_name() -> str:
    """A name that nothing else has: 128 bits as hexadecimal digits."""
    return f"{CHANCE.getrandbits(128):032x}"


class Process:
    """This process, as claims name it."""

    number = CHANCE.getrandbits(52)
    """As many digits as JSON's readers keep."""


def _be_another() -> None:
    Process.number = CHANCE.getrandbits(52)


os.register_at_fork(after_in_child=_be_another)
