"""The pages, a file for each: what a visit is shown, by `oncely.ops` alone."""
