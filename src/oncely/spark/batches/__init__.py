"""A batch handler: the messages of a batch that are new, handed to one function as a DataFrame."""
