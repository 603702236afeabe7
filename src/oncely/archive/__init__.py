"""Records that the ledger keeps no more, as Parquet: written, and looked up."""
