"""Modules that all ranks import, in 3 s of CPU. Their fork server imports this file. None initializes a GPU."""

import gc

# Garbage collections would visit the objects of some thousand modules again and again, here and in every rank. That
# would copy the memory that the ranks share with the fork server.
gc.disable()

import torch.distributed.fsdp  # noqa: E402, F401
import transformers.models.auto.modeling_auto  # noqa: E402, F401

gc.freeze()
gc.enable()
