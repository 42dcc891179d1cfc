"""HTTP clients for inference servers: generation, load balancing, weight updates and log-probabilities."""
