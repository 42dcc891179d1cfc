"""Verifiers, one file each."""

from slimectl.rewards.registry import known_types, verifier, weighted
from slimectl.rewards.verdict import Verdict, Verifier

__all__ = ["Verdict", "Verifier", "known_types", "verifier", "weighted"]
