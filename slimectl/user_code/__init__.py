"""Loads user functions by path, calls them by parameter name, and contains their side effects."""

from slimectl.user_code.callables import Hook, complete_path, error_location, load_callable, parameter_names
from slimectl.user_code.containment import ENDING, converted, handle_here, in_one_line

__all__ = [
    "ENDING",
    "Hook",
    "complete_path",
    "converted",
    "error_location",
    "handle_here",
    "in_one_line",
    "load_callable",
    "parameter_names",
]
