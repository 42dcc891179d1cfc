"""Sweeps: many runs that differ in a few settings and in their seeds, and which of them is best."""
