"""Server processes: start, health checks, restarts."""
