"""Scripts and modules that run in vLLM's Python. They do not import slimectl."""
