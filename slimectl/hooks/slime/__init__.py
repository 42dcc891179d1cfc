"""Adapter to functions that were written for slime: `flags` for `args`, and `shapes` for calls and results."""
