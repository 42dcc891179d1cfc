"""Environments by name: one adapter for each ecosystem behind one port, each episode in a process of its own."""
