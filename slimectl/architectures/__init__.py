"""Hugging Face and Megatron names and shapes, declared once per family; pure."""
