"""Ray cluster on one machine or several: actors for ranks, hosted objects, streams and workers."""

from slimectl.executors.ray.executor import RayExecutor

__all__ = ["RayExecutor"]
