"""How new weights reach an engine."""
