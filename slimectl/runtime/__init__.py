"""A training run: its loop of rollout and training, its checkpoints, its self-test."""
