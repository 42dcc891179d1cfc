"""vLLM engines: launch, API and weight updates."""
