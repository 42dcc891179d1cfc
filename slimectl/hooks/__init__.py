"""Loads user callables by path and calls them by parameter name."""

from slimectl.hooks.args import Args
from slimectl.hooks.calling import Hook, load_callable
from slimectl.hooks.containment import converted, in_one_line
from slimectl.hooks.points import POINTS, TRAINING, Point, check_hooks, hook, hooks

__all__ = ["POINTS", "TRAINING", "Args", "Hook", "Point", "check_hooks", "converted", "hook", "hooks", "in_one_line",
           "load_callable"]  # fmt: skip
