"""An environment of the user's own: a class by its path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimectl.environments.port import Environment
from slimectl.errors import HookError
from slimectl.user_code import load_callable


def user_environment(target: str, arguments: Mapping[str, Any]) -> Environment:
    """Return the environment that `package.module:Class` or `path/to/file.py:Class` makes of the arguments.

    Raises HookError if it is no Environment.
    """
    environment = load_callable(target, setting="rollout.env")(target, arguments)
    if not isinstance(environment, Environment):
        raise HookError(f"rollout.env: {target} is no subclass of slimectl.environments.port.Environment")
    return environment
