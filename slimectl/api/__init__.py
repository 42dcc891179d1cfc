"""The stages as Python functions, re-exported by `slimectl`. Commands call the same ones."""
