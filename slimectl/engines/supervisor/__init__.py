"""Server processes: starts, health checks and restarts."""
