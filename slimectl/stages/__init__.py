"""One verb, one file: convert, rollout, score, train, evaluate, run."""
