"""vLLM: its launch, its API, its weight updates."""
