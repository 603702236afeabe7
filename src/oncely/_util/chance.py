"""Chance that nobody else can repeat."""

from random import SystemRandom

CHANCE = SystemRandom()
"""The system's random numbers, never those of the `random` module: a program that seeds that, as
many do to make their runs repeatable, would make two workers take the same numbers, and each hold
the other's claim for its own. Nor are numbers taken from the program's own sequence.
"""


def new_name() -> str:
    """A name that nothing else has: 128 bits as hexadecimal digits."""
    return f"{CHANCE.getrandbits(128):032x}"
