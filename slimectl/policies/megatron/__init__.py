"""Megatron-core's GPTModel as a Policy: tensor, pipeline, context and expert parallelism, on GPUs and on a CPU.

Importing the package prepares megatron.core (see core.py), so that none of its modules can meet it unprepared.
"""

from slimectl.policies.megatron import patches

patches.prepare()
