"""The stages as Python functions, re-exported by `slimectl`; commands call the same ones."""
