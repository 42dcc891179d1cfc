"""Megatron-core without TransformerEngine and other kernel libraries, on GPUs too: defects mended in place.

Other such defects are avoided rather than mended: latent attention (mla.py) is our own, and so are the experts (moe.py)
and the saved state of optimizers.
"""

from __future__ import annotations


def install() -> None:
    """Mend the loaded modules; doing it again changes nothing."""
    _router_gate()
    _delta_net()


def _router_gate() -> None:
    """Give the router's matrix product a name that only an import of TransformerEngine defines.

    megatron-core (0.16.1): NameError on `te_general_gemm` in RouterGatingLinearFunction. Delete when moe_utils
    defines it without TransformerEngine.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _delta_net() -> None:
    """Let gated delta nets be built without flash-linear-attention.

    megatron-core (0.16.1) refuses to build the module, whose parameters we take and whose computation we do not
    (delta_net.py). Delete when it refuses only to run.
    """
    from megatron.core.ssm import gated_delta_net

    gated_delta_net.HAVE_FLA = True
