"""Hugging Face modules, one process or FSDP2."""
