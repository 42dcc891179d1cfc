"""Environments by name: one adapter per ecosystem, all with the same interface. Each episode has its own process."""
