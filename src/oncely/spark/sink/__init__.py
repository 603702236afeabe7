"""The sink: what every mode shares, from options and rows to counts and the quarantine."""
