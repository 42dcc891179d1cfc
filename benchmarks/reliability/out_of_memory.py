"""Packs that do not fit into memory: nothing raises, and loss and gradient are those of a run without a limit.

    python benchmarks/reliability/out_of_memory.py --seed 1 [--count 200]

Each attack draws a model (layers, widths, vocabulary), a policy or critic, an algorithm, samples and a limit. It is
between what each sample needs with recomputed activations, beside the gradients of the others, and what the step needs.
tests/memory_limit.py counts live bytes and fails the operation that exceeds the limit, wherever it is. The gradient is
compared with one without a limit, and bit for bit with one whose packs had the final size from the beginning.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))

import torch
from campaign import Campaign
from memory_limit import MemoryLimit
from policies.policy_cases import write_random_model
from torch import Tensor

from slimectl.algorithms.packing import BatchingOptions
from slimectl.algorithms.registry import ALGORITHMS
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import OutOfMemoryError
from slimectl.policies.fsdp.policy import FsdpActorCritic, FsdpCritic, FsdpPolicy
from slimectl.policies.lora import LoraOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.recompute import Recompute
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve
from slimectl.types import Loss, TrainingSample

TOLERANCE = 1e-6
"""Largest difference of a gradient, as a share of its largest entry."""
ALGORITHMS_OF_POLICIES = (
    "grpo", "gspo", "dapo", "cispo", "rloo", "reinforce_plus_plus", "sft", "dpo",
    "grpo algorithm.kl_loss_coef=0.1 algorithm.entropy_coef=0.01", "grpo algorithm.use_tis=true",
)  # fmt: skip
SLACK = 4096
"""Bytes for the metrics of packs, which are sums of their own."""
KINDS = ("policy", "LoRA", "critic", "shared critic")


@dataclass(frozen=True)
class Trial:
    """A model with its samples and loss, drawn at random."""

    folder: Path
    kind: str
    loss: Loss
    rows: list[TrainingSample]
    options: TrainerOptions

    def new(self, **changes: Any) -> Any:
        trainers: dict[str, Any] = {"critic": FsdpCritic, "shared critic": FsdpActorCritic}
        return trainers.get(self.kind, FsdpPolicy)(self.folder, HFCheckpoint(), replace(self.options, **changes))


def drawn_model(draw: random.Random, folder: Path, *, padded: bool) -> Path:
    width, heads, layers = draw.choice([16, 32, 48, 64]), draw.choice([2, 4]), draw.randint(1, 3)
    sizes = {"vocab_size": draw.choice([64, 256, 1024]), "hidden_size": width, "num_hidden_layers": layers,
             "num_attention_heads": heads, "max_position_embeddings": 512, "pad_token_id": None}  # fmt: skip
    inner = draw.choice([1, 2, 4]) * width
    if padded:
        return write_random_model(folder, "opt", ffn_dim=inner, word_embed_proj_dim=width, **sizes)
    return write_random_model(
        folder, draw.choice(["llama", "qwen2", "qwen3", "gemma2"]), intermediate_size=inner,
        num_key_value_heads=draw.choice([1, heads]), head_dim=draw.choice([8, 16]),
        tie_word_embeddings=draw.random() < 0.5, **sizes,
    )  # fmt: skip


def drawn_rows(draw: random.Random, vocabulary: int) -> list[TrainingSample]:
    """Groups of responses to shared prompts, with every column that a loss may read."""
    rows: list[TrainingSample] = []
    for group in range(draw.randint(1, 5)):
        prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 60))]
        for _ in range(draw.randint(1, 6)):
            length = draw.randint(1, 60)

            def column(low: float, high: float, length: int = length) -> list[float]:
                return [draw.uniform(low, high) for _ in range(length)]

            rows.append(
                TrainingSample(
                    prompt + [draw.randrange(vocabulary) for _ in range(length)], length, column(0, 0.02),
                    advantages=column(-1, 1), old_log_probs=column(-7, -3), ref_log_probs=column(-7, -3),
                    rollout_log_probs=column(-7, -3), values=column(-1, 1), returns=column(-1, 1), group=group,
                    reward=draw.uniform(-1, 1), index=len(rows),
                )
            )  # fmt: skip
    return rows


def drawn_trial(draw: random.Random, folder: Path) -> tuple[str, Trial]:
    """Return the category and the trial."""
    padded, kind = draw.random() < 0.4, draw.choice(KINDS)
    name = draw.choice(ALGORITHMS_OF_POLICIES)
    if kind.endswith("critic"):
        name = "ppo" if kind == "critic" else "ppo algorithm.critic=shared"
    algorithm = resolve([from_assignments([f"algorithm.name={name.split()[0]}", *name.split()[1:]])]).settings.algorithm
    model = drawn_model(draw, folder, padded=padded)
    rows = drawn_rows(draw, 64)
    functions = ALGORITHMS[algorithm.name]
    loss = functions.loss(algorithm, rows)
    if kind == "critic":
        assert functions.critic_loss is not None
        loss = functions.critic_loss(algorithm, rows)
    elif kind == "shared critic":
        assert functions.joint_loss is not None
        loss = functions.joint_loss(algorithm, rows, loss)
    recompute = draw.choice(["none", "none", "none" if padded else "selective", "full"])
    options = TrainerOptions(
        max_tokens_per_pack=draw.choice([100, 400, 4096]),
        batching=BatchingOptions(micro_batch_size=draw.choice([None, None, 8])),
        share_prefixes=draw.random() < 0.7,
        recompute=Recompute(recompute),
        lora=LoraOptions(4, 8.0, ("q_proj", "v_proj")) if kind == "LoRA" else None,
        temperature=draw.choice([1.0, 0.7]),
    )
    category = f"{'padded' if padded else 'packed'} rows, {kind}"
    return category, Trial(model, kind, loss, rows, options)


def gradient(trainer: Any) -> Tensor:
    return torch.cat([part.flatten() for part in trainer.masters.gradients()])


def needed(work: Callable[[], Any]) -> int:
    with MemoryLimit() as memory:
        work()
    return memory.peak


def kept_bytes(trainer: Any) -> int:
    """Return the bytes of the gradients, which other packs leave in memory."""
    return sum(part.nbytes for part in trainer.masters.gradients())


def attack(trial: Trial, share: float, faults: Counter[str]) -> str:
    """Compute a step under a limit, and return what is wrong, or ""."""
    plain = trial.new()
    plain.forward_backward(trial.rows, trial.loss)  # fills the caches of libraries
    plain = trial.new()
    most = needed(lambda: plain.forward_backward(trial.rows, trial.loss))
    smallest = trial.new(batching=BatchingOptions(micro_batch_size=1), recompute=Recompute("full"))
    smallest.forward_backward(trial.rows, trial.loss)
    least = SLACK + kept_bytes(smallest) + needed(lambda: smallest.forward_backward(trial.rows, trial.loss))
    limited = trial.new()
    outputs = limited.values if trial.kind == "critic" else limited.log_probs
    expected_outputs = (plain.values if trial.kind == "critic" else plain.log_probs)(trial.rows)
    try:
        with MemoryLimit(least + share * max(0, most - least)) as memory:
            found_outputs = outputs(trial.rows)
            metrics = limited.forward_backward(trial.rows, trial.loss)
    except (OutOfMemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    faults.update("backward" if backward else "forward" for backward in memory.in_backward)
    if "samples_left_out" in metrics:
        return "left samples out"
    found, expected = gradient(limited), gradient(plain)
    difference = float((found - expected).abs().max() / expected.abs().max())
    if difference > TOLERANCE:
        return f"the gradient differs by {difference:.2g}"
    wrong = max(abs(a - b) for one, other in zip(found_outputs, expected_outputs, strict=True)
                for a, b in zip(one, other, strict=True))  # fmt: skip
    if wrong > 1e-5:
        return f"log-probabilities differ by {wrong:.2g}"
    fit = limited.fitter
    smaller = trial.new(
        max_tokens_per_pack=fit.planning.max_tokens_per_pack,
        batching=replace(fit.planning.batching, padded=False),
        recompute=Recompute("full") if fit.recomputes else trial.options.recompute,
    )
    if smaller.forward_backward(trial.rows, trial.loss) != metrics or not torch.equal(gradient(smaller), found):
        return "not the bits of a run with these packs"
    faults["attacks that ran out of memory"] += bool(memory.faults)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    given = parser.parse_args()
    for name in ("slimectl", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    gc.freeze()  # as a run does: collections would look at all imported objects
    campaign, faults = Campaign("out of memory", given.seed), Counter[str]()
    for number in range(given.count):
        draw = random.Random(f"{given.seed}:{number}")
        with tempfile.TemporaryDirectory() as folder:
            category, trial = drawn_trial(draw, Path(folder))
            share = draw.uniform(0, 1) ** 0.5
            observation = attack(trial, share, faults)
        what = f"number {number}, {trial.loss}, {len(trial.rows)} samples, limit {share:.3f}"
        campaign.record(category, what, survived=not observation, observation=observation)
    code = campaign.finish()
    print(", ".join(f"{name}: {count}" for name, count in sorted(faults.items())))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
