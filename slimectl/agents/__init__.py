"""Agents as programs: processes that send requests to the policy, and an endpoint that records them."""
