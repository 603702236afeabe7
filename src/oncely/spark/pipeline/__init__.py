"""`oncely pipeline run`: a file that names a source, a handler and a ledger."""
