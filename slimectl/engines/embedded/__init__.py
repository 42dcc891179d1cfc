"""The engine inside this process: continuous batching on a CPU or one GPU."""
