"""A policy in rank processes that can be built again with another layout: processes are what costs time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from slimectl.checkpoints.torch_dist.mapping import ModelCheckpoint
from slimectl.executors.local import LocalExecutor
from slimectl.executors.rank_group import PRELOAD
from slimectl.policies.megatron import parallel
from slimectl.policies.megatron.hooks import UserFunctions
from slimectl.policies.megatron.policy import MegatronPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import MegatronOptions, TrainerOptions
from slimectl.policies.rank_group import DistributedPolicy
from slimectl.protocols import Adapter
from slimectl.types import Loss, Metrics, TopTokens, TrainingSample

STEADY = OptimizerOptions(lr=1e-3, eps=1e-3, weight_decay=0.1)
"""Large steps, of which each gradient decides its own part: with Adam's usual eps the rounding of gradients near zero
becomes whole steps, and two orders of summing soon two models."""


def megatron(
    model_dir: Path, *, kind: type = MegatronPolicy, user_functions: UserFunctions | None = None, **options: Any
) -> Any:
    own = {field.name: options.pop(field.name) for field in fields(MegatronOptions) if field.name in options}
    common = TrainerOptions(**({"optimizer": STEADY, "max_tokens_per_pack": 60} | options))
    return kind(model_dir, ModelCheckpoint(), common, MegatronOptions(**own), user_functions)


def release_graph(chunk: nn.Module) -> None:
    """Drop the tensors that mcore's token dispatchers keep of the last pass.

    Their graph ends in hooks that refer to the chunk: a cycle that Python's collector cannot see.
    """
    for module in chunk.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        for name, value in list(vars(dispatcher).items()) if dispatcher is not None else []:
            if isinstance(value, Tensor):
                setattr(dispatcher, name, None)


class Rebuilt:
    """What a rank holds: the policy that was asked for last."""

    weight_version = "0"

    policy: Any = None

    def __init__(self) -> None:
        gc.freeze()  # `hold` collects: it need not look through all that was imported every time

    def build(self, model_dir: Path, options: dict[str, Any]) -> None:
        self.hold(partial(megatron, model_dir, **options))

    def hold(self, make: Callable[[], Any]) -> None:
        for chunk in getattr(self.policy, "chunks", ()):
            release_graph(chunk)
            del chunk
        self.policy = None
        gc.collect()  # the last policy's references keep its groups, and they their threads
        parallel.stop()
        self.policy = make()

    def ask(self, method: str, *arguments: Any) -> Any:
        return getattr(self.policy, method)(*arguments)

    def values(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        return self.policy.values(rows)

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        return self.policy.log_probs(rows)

    def top_log_probs(self, rows: Sequence[TrainingSample], k: int) -> list[list[TopTokens]]:
        return self.policy.top_log_probs(rows, k)

    def forward_backward(self, rows: Sequence[TrainingSample], loss: Loss) -> Metrics:
        return self.policy.forward_backward(rows, loss)

    def optim_step(self) -> Metrics:
        return self.policy.optim_step()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.policy.weights()

    def adapter(self) -> Adapter:
        return self.policy.adapter()

    def save(self, path: Path) -> None:
        self.policy.save(path)

    def load(self, path: Path) -> None:
        self.policy.load(path)

    def close(self) -> None:
        self.policy.close()


class Ranks(DistributedPolicy):
    """The group that holds them."""

    def __init__(self, ranks: int) -> None:
        if (module := "slimectl.policies.megatron.policy") not in PRELOAD:
            PRELOAD.append(module)  # 1.6 s of CPU for every rank, unless other ranks have started before
        super().__init__(LocalExecutor(), Rebuilt, ranks=ranks)

    def build(self, model_dir: Path, **options: Any) -> Ranks:
        self._call("build", model_dir, options)
        return self

    def hold(self, make: Callable[[], Any]) -> Ranks:
        """Let every rank hold what it makes."""
        self._call("hold", make)
        return self

    def ask(self, method: str, *arguments: Any) -> Any:
        """A method of what is held."""
        return self._call("ask", method, *arguments)

    def values(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        return self._call("values", rows)
