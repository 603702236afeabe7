"""How a ledger carries out what it is asked: alone, in batches, or in a transaction."""
