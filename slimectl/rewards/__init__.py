"""Verifiers: functions that grade samples."""

from slimectl.rewards.base import Grade, Verifier
from slimectl.rewards.registry import WeightedSum, known_types, takes_url, verifier, weighted
from slimectl.rewards.user_function import RewardFunction, UserFunction

__all__ = [
    "Grade",
    "RewardFunction",
    "UserFunction",
    "Verifier",
    "WeightedSum",
    "known_types",
    "takes_url",
    "verifier",
    "weighted",
]
