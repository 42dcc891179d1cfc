"""Verifiers, one file each."""

from slimectl.rewards.registry import Verifier, known_types, verifier

__all__ = ["Verifier", "known_types", "verifier"]
