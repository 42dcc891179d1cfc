"""Settings: one section per stage, layered with provenance."""
