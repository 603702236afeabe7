"""Batch handlers: one function gets the new messages of a batch as a DataFrame."""
