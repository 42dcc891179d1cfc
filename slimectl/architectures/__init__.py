"""Hugging Face and Megatron names and shapes, declared once per model family, without side effects."""
