"""The stages as Python functions. `slimectl` re-exports them, and the commands call them too."""
