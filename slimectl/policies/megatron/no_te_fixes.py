"""Megatron-core without TransformerEngine and apex, on GPUs too: a defect that only shows then, mended in place.

Other such defects are avoided rather than mended: latent attention (mla.py) is our own, and so are the experts (moe.py)
and the saved state of optimizers.
"""

from __future__ import annotations

import importlib.util


def needed() -> bool:
    """Whether TransformerEngine is absent."""
    return importlib.util.find_spec("transformer_engine") is None


def install() -> None:
    """Give the router's matrix product a name that only an import of TransformerEngine defines.

    megatron-core (0.16.1): NameError on `te_general_gemm` in RouterGatingLinearFunction. Delete when moe_utils
    defines it without TransformerEngine, and this module with it.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
