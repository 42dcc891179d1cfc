"""Runs training: the loop of rollout and training, checks before it, records and checkpoints."""
