"""A Ray cluster, on this machine or over many: actors for ranks, hosted objects, streams and workers."""

from slimectl.executors.ray.executor import RayExecutor

__all__ = ["RayExecutor"]
