"""Loads a user's environment from the path of its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimectl.agents.environments.port import Environment
from slimectl.errors import HookError
from slimectl.plugins.callables import load_callable


def user_environment(target: str, arguments: Mapping[str, Any]) -> Environment:
    """Make an environment of the class `package.module:Class` or `path/to/file.py:Class` with these arguments.

    Raises HookError if it is not an Environment.
    """
    environment = load_callable(target, setting="rollout.env")(target, arguments)
    if not isinstance(environment, Environment):
        raise HookError(f"rollout.env: {target} is not a subclass of slimectl.agents.environments.port.Environment")
    return environment
