"""Trackers: outputs for metrics."""
