"""The modes of the sink: what a task does with its rows."""
