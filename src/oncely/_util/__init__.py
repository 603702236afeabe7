"""Helpers that know nothing of messages."""
