"""Verifiers: functions that grade samples."""

from slimectl.rewards.base import Grade, Verifier
from slimectl.rewards.components import TOTAL, ComponentValues, components
from slimectl.rewards.registry import WeightedSum, known_types, part_weights, takes_url, verifier, weighted
from slimectl.rewards.user_function import RewardFunction, UserFunction

__all__ = [
    "TOTAL",
    "ComponentValues",
    "Grade",
    "RewardFunction",
    "UserFunction",
    "Verifier",
    "WeightedSum",
    "components",
    "known_types",
    "part_weights",
    "takes_url",
    "verifier",
    "weighted",
]
