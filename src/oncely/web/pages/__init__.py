"""The pages: what a visit is shown, by `oncely.ops` alone."""
