"""Hooks: functions that a user names in settings; their table, signatures, and the object that stages get of them.

`slimectl.hooks.user_hooks.UserHooks` is that object. It is not imported here: the table is read without torch.
"""

from slimectl.hooks.args import FlatSettings
from slimectl.hooks.registry import HOOKS, TRAINING_HOOKS, HookSpec, check_hooks, hook, hooks

__all__ = ["HOOKS", "TRAINING_HOOKS", "FlatSettings", "HookSpec", "check_hooks", "hook", "hooks"]
