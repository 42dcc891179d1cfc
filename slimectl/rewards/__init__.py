"""Verifiers, one file each."""

from slimectl.rewards.base import Grade, Verifier
from slimectl.rewards.registry import known_types, verifier, weighted

__all__ = ["Grade", "Verifier", "known_types", "verifier", "weighted"]
