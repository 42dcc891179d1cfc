"""Any causal language model of transformers, run by the embedded engine's scheduler and sampler."""
