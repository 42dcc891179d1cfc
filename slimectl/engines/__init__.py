"""Engines that generate text from prompts."""
