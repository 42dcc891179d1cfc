"""Executors: run work on this machine or on a Ray cluster."""
