"""Checks of this machine, for `slimectl doctor`."""
