"""Imports of all ranks, 3 s of CPU: their fork server imports this module. None of them initializes a GPU."""

import gc

# Garbage collections would look at the objects of some thousand modules again and again, here and in every rank, which
# would copy the memory that it shares with the fork server.
gc.disable()

import torch.distributed.fsdp  # noqa: E402, F401
import transformers.models.auto.modeling_auto  # noqa: E402, F401

gc.freeze()
gc.enable()
