"""Handlers in a process of their own: one that dies takes no task of Spark with it."""
