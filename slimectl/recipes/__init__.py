"""Named runs that ship with slimectl."""
