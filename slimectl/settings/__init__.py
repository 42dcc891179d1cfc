"""Settings: one section per stage, layered with provenance."""

from slimectl.settings.layers import Layer
from slimectl.settings.loading import Resolved, resolve
from slimectl.settings.root import Settings

__all__ = ["Layer", "Resolved", "Settings", "resolve"]
