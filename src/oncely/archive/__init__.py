"""Archives: records that have left the ledger, written to Parquet files and looked up in them."""
