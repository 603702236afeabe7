"""What people ask of a ledger with Spark: a reconciliation, and the figures of a report."""
