"""The sink: the common part of all modes, from options and rows to counts and the quarantine."""
