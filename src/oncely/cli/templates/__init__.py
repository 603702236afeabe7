"""First programs, which `oncely init` copies as they stand here: checked and run with our own."""
