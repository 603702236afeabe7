"""Handlers run in a process of their own: if one dies, Spark's task survives."""
