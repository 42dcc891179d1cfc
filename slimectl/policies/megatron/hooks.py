"""User functions of [megatron] on every rank: initialization, model provider, before log-probabilities and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slimectl.policies.megatron.model import PackedGPT
from slimectl.user_code import Hook


@dataclass(frozen=True)
class UserFunctions:
    """User functions of one model; `store_prefix` names the model: "" is the policy, or "ref_", "teacher_"."""

    args: Any
    """The flat settings, as every function gets them."""
    init: Hook | None
    provider: Hook | None
    log_prob: Hook | None
    train_step: Hook | None
    store_prefix: str = ""

    def begin(self) -> None:
        """Call the init function: after the process groups are created, before the model is built."""
        self._call(self.init)

    def provide(
        self, build: Callable[[], PackedGPT], *, pre_process: bool, post_process: bool, vp_stage: int | None
    ) -> PackedGPT:
        """Build a chunk of the model. Raises HookError if the function returns an object of another type."""
        if self.provider is None:
            return build()
        stage = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
        chunk = self._call(self.provider, **stage, build=build)
        if not isinstance(chunk, PackedGPT):
            raise self.provider.returned(chunk, f"what build() makes, a {PackedGPT.__name__}, or a subclass of it")
        return chunk

    def before_log_probs(self, model: Sequence[Any]) -> None:
        self._call(self.log_prob, model=model, store_prefix=self.store_prefix)

    def before_step(
        self, rollout_id: int, step_id: int, *, model: Sequence[Any], optimizer: Any, scheduler: Callable[[int], float]
    ) -> None:
        step_ids = {"rollout_id": rollout_id, "step_id": step_id}
        self._call(self.train_step, **step_ids, model=model, optimizer=optimizer, scheduler=scheduler)

    def _call(self, user_hook: Hook | None, **available: Any) -> Any:
        return None if user_hook is None else user_hook({"args": self.args, "settings": self.args, **available})
