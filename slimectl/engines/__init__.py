"""What samples text."""
