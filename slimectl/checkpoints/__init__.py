"""Checkpoint formats: Hugging Face, torch_dist, GGUF and quantized weights."""
