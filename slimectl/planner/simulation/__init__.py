"""Simulates a rank's training step with fake tensors and a fake process group: memory, collectives, devices."""
