"""Megatron-core's GPTModel as a Policy: tensor, pipeline, context and expert parallelism, on GPUs and on a CPU.

Importing the package prepares megatron.core (see patches.py) before any of its modules is used.
"""

from slimectl.policies.megatron import patches

patches.prepare()
