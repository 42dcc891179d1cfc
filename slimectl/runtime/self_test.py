"""Self-test: checks that engine and trainer compute equal log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from slimectl.data.hashing import tensor_checksum
from slimectl.hooks.user_hooks import UserHooks
from slimectl.protocols import Policy
from slimectl.runtime import builders
from slimectl.runtime.check_result import CheckResult
from slimectl.runtime.rollout_worker import RolloutService
from slimectl.settings import Settings
from slimectl.stages.advantages import Models
from slimectl.stages.run import run, streamed
from slimectl.types import Prompt, SamplerState

QUESTIONS = ("The capital of France is", "One, two, three,", "Water boils at", "Once upon a time", "def add(a, b):")


def questions() -> Iterator[Prompt]:
    """Yield prompts that any language model can continue."""
    for index, text in enumerate(QUESTIONS):
        yield Prompt(text, label="", index=index)


def self_test(settings: Settings, *, steps: int) -> Iterator[CheckResult]:
    """Run `steps` rounds of the real loop with learning rate 0. Weights must stay, log-probabilities must match.

    Engine and trainer compute the probabilities of the same tokens from the same weights. A difference beyond rounding
    is an error in weights, positions, masks or temperature.
    """
    model = builders.model_folder(settings.model.path)
    with TemporaryDirectory(prefix="slimectl-doctor-") as scratch:
        executor = builders.executor(settings, logs=Path(scratch) / "logs")
        side = policy = sync = None
        try:
            policy = builders.policy(settings, model, total_steps=None, lr=0.0, executor=executor)
            side = RolloutService(settings, model, executor=executor, folder=Path(scratch))
            sync = side.sync(policy)
            initial = _checksums(policy)
            reports = run(
                streamed(partial(side.sampler.rounds, SamplerState()), executor, settings.run),
                Models(policy),
                sync,
                settings,
                hooks=UserHooks(settings),
            )
            for report, _ in zip(reports, range(steps), strict=False):
                difference = report.metrics.get("train/train_rollout_logprob_abs_diff", float("nan"))
                allowed = settings.run.max_logprob_mismatch or float("inf")
                detail = f"{difference:.2e} per token between engine and trainer, {allowed:g} allowed"
                yield CheckResult(f"agreement, step {report.step}", difference <= allowed, detail)
            changed = [name for name, checksum in _checksums(policy).items() if initial[name] != checksum]
            detail = (
                f"{len(initial)} tensors"
                if not changed
                else f"{len(changed)} of {len(initial)} moved, first {changed[0]}"
            )
            yield CheckResult(f"weights after {steps} steps", not changed, detail)
        finally:
            for part in (sync, side, policy, executor):
                if part is not None:
                    part.close()


def _checksums(policy: Policy) -> dict[str, str]:
    return {name: tensor_checksum(tensor) for name, tensor in policy.weights()}
