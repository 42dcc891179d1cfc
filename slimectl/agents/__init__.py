"""Agents as programs: an endpoint that records what they ask the policy, and processes that ask it."""
