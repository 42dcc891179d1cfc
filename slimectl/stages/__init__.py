"""The stages, one per file: convert, rollout, score, train, evaluate, run."""
