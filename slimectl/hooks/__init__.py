"""User callables by path, called by parameter name."""

from slimectl.hooks.args import Args
from slimectl.hooks.calling import Hook, load_callable
from slimectl.hooks.points import POINTS, TRAINING, Point, check_hooks, hook, hooks

__all__ = ["POINTS", "TRAINING", "Args", "Hook", "Point", "check_hooks", "hook", "hooks", "load_callable"]
