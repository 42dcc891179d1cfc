"""Hooks, which are user functions given by path: their table, their signatures, and the object for stages.

`slimectl.hooks.user_hooks.UserHooks` is that object. It is not imported here, so the table can be read without torch.
"""

from slimectl.hooks.args import FlatSettings
from slimectl.hooks.registry import HOOKS, TRAINING_HOOKS, HookSpec, check_hooks, hook, hooks

__all__ = ["HOOKS", "TRAINING_HOOKS", "FlatSettings", "HookSpec", "check_hooks", "hook", "hooks"]
