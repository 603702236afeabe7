"""The Spark format "oncely-rabbitmq": a queue as a source, spooled before it is acknowledged."""
