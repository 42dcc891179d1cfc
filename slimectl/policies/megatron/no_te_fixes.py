"""Megatron-core without TransformerEngine and apex, on GPUs too: defects that only show then, mended in place.

Delete a fix when the comment at it says so; delete the module when megatron-core's own local modules are tested
without TransformerEngine upstream.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch


def needed() -> bool:
    """Whether TransformerEngine is absent."""
    return importlib.util.find_spec("transformer_engine") is None


def install() -> None:
    """Mend the loaded modules; doing it again changes nothing."""
    _router_gate()
    _distributed_optimizer_steps()


def _router_gate() -> None:
    """The router's matrix product asks for a name that only an import of TransformerEngine defines.

    megatron-core (0.16.1): NameError on `te_general_gemm` in RouterGatingLinearFunction. Delete when moe_utils
    defines it without TransformerEngine.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _distributed_optimizer_steps() -> None:
    """Adam's step counts, which torch keeps one tensor of per parameter.

    megatron-core (0.16.1): DistributedOptimizer over torch's AdamW cannot give its state before the first step (no
    count to read), and gives all parameters one tensor when it loads: each then counts every other's steps. Delete
    when `state_dict` works on a fresh optimizer and `load_state_dict` copies `step`.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if getattr(DistributedOptimizer, "_slimectl_steps", False):
        return
    state_dict, load_state_dict = DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict

    def with_steps(self: Any) -> Any:
        _begin(self.optimizer)
        return state_dict(self)

    def load_with_steps(self: Any, given: Any) -> None:
        _begin(self.optimizer)
        load_state_dict(self, given)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    DistributedOptimizer.state_dict = with_steps
    DistributedOptimizer.load_state_dict = load_with_steps
    DistributedOptimizer._slimectl_steps = True


def _begin(optimizer: Any) -> None:
    """State of step zero for the parameters of torch's Adam that have none yet."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return
    for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
