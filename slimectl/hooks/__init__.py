"""Loads user callables by path and calls them by parameter name."""

from slimectl.hooks.args import FlatSettings
from slimectl.hooks.callables import Hook, load_callable
from slimectl.hooks.containment import converted, in_one_line
from slimectl.hooks.registry import HOOKS, TRAINING_HOOKS, HookSpec, check_hooks, hook, hooks

__all__ = [
    "HOOKS",
    "TRAINING_HOOKS",
    "FlatSettings",
    "Hook",
    "HookSpec",
    "check_hooks",
    "converted",
    "hook",
    "hooks",
    "in_one_line",
    "load_callable",
]
