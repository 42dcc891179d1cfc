"""Policies on Hugging Face models, in one process or sharded with FSDP2."""
