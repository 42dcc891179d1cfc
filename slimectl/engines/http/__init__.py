"""HTTP clients of inference servers: transport, dispatch, generation, weight updates, log-probabilities."""
