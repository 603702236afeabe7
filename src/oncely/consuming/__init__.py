"""What brings messages from a transport to a handler."""
