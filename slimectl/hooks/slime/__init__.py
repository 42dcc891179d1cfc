"""Adapter to functions that were written for slime: `flags` of `args`, `shapes` of calls and results, `modules`."""
