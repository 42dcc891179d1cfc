"""The embedded engine: continuous batching on a CPU or one GPU, inside this process."""
