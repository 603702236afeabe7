"""The rules and their words: pure, without I/O, clock, randomness or logging."""
