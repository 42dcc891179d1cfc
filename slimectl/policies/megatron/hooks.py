"""User functions of [megatron] on every rank: initialization, model provider, before log-probabilities and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel

from slimectl.architectures.parallel import ParallelLayout
from slimectl.plugins.callables import Hook
from slimectl.policies.megatron.model import PackedGPT
from slimectl.policies.megatron.own_model import adopted


@dataclass(frozen=True)
class UserFunctions:
    """User functions of one model. `store_prefix` identifies it: "" for the policy, or "ref_" or "teacher_"."""

    args: Any
    """The flat settings, which every function receives."""
    init: Hook | None
    provider: Hook | None
    log_prob: Hook | None
    train_step: Hook | None
    store_prefix: str = ""

    def begin(self) -> None:
        """Call the init function, after the process groups are created and before the model is built."""
        self._call(self.init)

    def provide(self, build: Callable[[], PackedGPT], layout: ParallelLayout, **stage: Any) -> PackedGPT:
        """Build a chunk of the model. Raises HookError if the function returns an object of another type.

        A GPTModel that the function built itself is adapted. `stage` has config, vocab_size, pre_process, post_process
        and vp_stage.
        """
        if self.provider is None:
            return build()
        chunk = self._call(self.provider, **stage, build=build)
        if isinstance(chunk, PackedGPT):
            return chunk
        if not isinstance(chunk, GPTModel):
            raise self.provider.returned(chunk, "the result of build(), or a GPTModel of megatron-core")
        return adopted(chunk, stage["config"], layout)

    def before_log_probs(self, model: Sequence[Any]) -> None:
        self._call(self.log_prob, model=model, store_prefix=self.store_prefix)

    def before_step(
        self, rollout_id: int, step_id: int, *, model: Sequence[Any], optimizer: Any, scheduler: Callable[[int], float]
    ) -> None:
        step_ids = {"rollout_id": rollout_id, "step_id": step_id}
        self._call(self.train_step, **step_ids, model=model, optimizer=optimizer, scheduler=scheduler)

    def _call(self, user_hook: Hook | None, **available: Any) -> Any:
        return None if user_hook is None else user_hook({"args": self.args, "settings": self.args, **available})
