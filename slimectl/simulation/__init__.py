"""One rank's training step with fake tensors and a fake process group: its memory, collectives and devices."""
