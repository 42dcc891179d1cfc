"""Loads functions of the user by path, calls them by parameter name, and contains their side effects."""

from slimectl.user_code.callables import Hook, load_callable
from slimectl.user_code.containment import converted, in_one_line

__all__ = ["Hook", "converted", "in_one_line", "load_callable"]
