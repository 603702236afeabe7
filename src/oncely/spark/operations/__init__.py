"""Spark jobs for operators: reconciliation, and the figures of a report."""
