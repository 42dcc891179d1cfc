"""Estimates memory, FLOPs and time of a run with pure functions."""
