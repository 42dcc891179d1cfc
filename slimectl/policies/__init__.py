"""Trainable policies: Hugging Face models on FSDP2 and Megatron-core models, with their optimizers."""
