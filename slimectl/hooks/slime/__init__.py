"""Adapter to functions that were written for slime: `flags` of `args`, and `shapes` of calls and results."""
