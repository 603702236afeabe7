"""First programs that `oncely init` copies unchanged; the tests check and run them."""
