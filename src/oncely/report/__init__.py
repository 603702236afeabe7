"""The report: what a ledger adds up to, as plots on one page that needs nothing else."""
