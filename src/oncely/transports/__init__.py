"""Where messages come from and go to: one module for each kind of broker."""
