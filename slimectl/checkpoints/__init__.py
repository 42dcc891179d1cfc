"""Layouts of weights on disk."""
