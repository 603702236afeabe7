"""oncely on Spark: the sink `format("oncely")` and the pipeline."""
