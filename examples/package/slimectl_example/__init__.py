"""A package of somebody else, with a part of each kind for slimectl."""
