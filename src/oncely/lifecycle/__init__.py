"""What surrounds a handler: its claim before, its record after, its steps and sends within."""
