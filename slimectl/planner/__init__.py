"""Estimates memory, FLOPs and time of a run by formula. Pure functions."""
