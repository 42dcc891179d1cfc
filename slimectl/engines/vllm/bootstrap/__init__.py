"""Scripts and modules that run in vLLM's Python; none of them imports slimectl."""
