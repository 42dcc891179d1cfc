"""Ray itself, if it is installed."""

from slimectl.errors import MissingExtraError

try:
    import ray
except ImportError:
    raise MissingExtraError("ray", extra="ray", wanted_by='cluster.executor = "ray"') from None

__all__ = ["ray"]
