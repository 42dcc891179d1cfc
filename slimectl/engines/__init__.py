"""Engines: sample text from prompts."""
