"""Names and shapes of weights, one file per family."""
