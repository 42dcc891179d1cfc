"""Modules for the launch scripts that run in a server's own Python. They do not import slimectl."""
