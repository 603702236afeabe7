"""What has nothing to do with messages."""
