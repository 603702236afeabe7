"""Registers the Spark format "oncely": Spark imports top-level modules named pyspark_*."""
