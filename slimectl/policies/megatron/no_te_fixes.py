"""Patches for Megatron-core without TransformerEngine and other kernel libraries, on GPUs too.

Other such defects are avoided rather than patched: this package has its own latent attention (mla.py), experts (moe.py)
and saved optimizer state.
"""

from __future__ import annotations


def install() -> None:
    """Patch the loaded modules; idempotent."""
    _patch_router_gate()
    _patch_delta_net()


def _patch_router_gate() -> None:
    """Define a name that the router's matrix product reads and only an import of TransformerEngine defines.

    megatron-core (0.16.1): NameError on `te_general_gemm` in RouterGatingLinearFunction. Delete when moe_utils
    defines it without TransformerEngine.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _patch_delta_net() -> None:
    """Allow building gated delta nets without flash-linear-attention.

    megatron-core (0.16.1) refuses to build the module, whose parameters we take and whose computation we do not
    (delta_net.py). Delete when it refuses only to run.
    """
    from megatron.core.ssm import gated_delta_net

    gated_delta_net.HAVE_FLA = True
