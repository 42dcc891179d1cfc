"""RL post-training of language models as composable command-line stages."""

__version__ = "0.1.0"
