"""HTTP to servers of any kind: requests, retries, and an event loop in a thread."""
