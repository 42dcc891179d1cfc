"""Verifiers: functions that grade samples."""

from slimectl.rewards.base import Grade, Verifier
from slimectl.rewards.registry import known_types, takes_url, verifier, weighted

__all__ = ["Grade", "Verifier", "known_types", "takes_url", "verifier", "weighted"]
