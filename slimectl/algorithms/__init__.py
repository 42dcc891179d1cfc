"""Pure tensor mathematics of RL post-training."""
