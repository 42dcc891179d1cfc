"""A training step of the FSDP policy against the padded Hugging Face step that people write, in CPU seconds.

    python benchmarks/training.py --model DIR                                   # 8 answers of 16..128 to 256 tokens
    python benchmarks/training.py --model DIR --prompts 64 --prompt 20 --answer 4 16

Both sides: one thread, the same rows, the same clipped surrogate, AdamW, one forward, backward and update. The Hugging
Face side is `model(input_ids, attention_mask)` padded to the longest row, `log_softmax` over its full logits, fused
AdamW; in bfloat16 a model in bfloat16. It is measured in every setting of --micro-batch and --attention, and the
fastest counts. Rounds alternate; medians are shown.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.types import Row

Step = Callable[[], float]


class Surrogate:
    """The clipped surrogate, 0.2 to either side."""

    needs_entropy = False

    def __call__(self, pack: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return surrogate(pack.logprobs_T, pack.old_logprobs_T, pack.advantages_T, pack.weights_T), {}


def surrogate(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    ratio = torch.exp(logprobs - old)
    return -(weights * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)).sum()


def drawn_rows(options: argparse.Namespace, vocabulary: int) -> list[Row]:
    draw = random.Random(0)
    rows = []
    for group in range(options.prompts):
        prompt = [draw.randrange(vocabulary) for _ in range(options.prompt)]
        for _ in range(options.answers):
            length = draw.randint(*options.answer)
            tokens = prompt + [draw.randrange(vocabulary) for _ in range(length)]
            advantages = [draw.choice([-1.0, 1.0])] * length
            rows.append(Row(tokens, length, [1e-3] * length, advantages, [0.0] * length, group=group))
    return rows


def own_step(model: Path, rows: list[Row], dtype: str) -> Step:
    options = OptimizerOptions(lr=1e-6)
    policy = FsdpPolicy(model, HFCheckpoint(), optimizer=options, dtype=dtype, max_tokens_per_pack=16384)
    for row, logprobs in zip(rows, policy.log_probs(rows), strict=True):
        row.old_log_probs = logprobs

    def step() -> float:
        policy.forward_backward(rows, Surrogate())
        return policy.optim_step()["grad_norm"]

    return step


def padded_step(model_dir: Path, rows: list[Row], dtype: str, micro_batch: int, attention: str) -> Step:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype), attn_implementation=attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    model.train()

    def micro_step(rows: list[Row]) -> None:
        width = max(len(row.tokens) for row in rows)
        ids = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in rows])
        mask = torch.tensor([[1] * len(row.tokens) + [0] * (width - len(row.tokens)) for row in rows])

        def column(name: str) -> torch.Tensor:
            filled = torch.zeros(len(rows), width)
            for i, row in enumerate(rows):
                filled[i, row.prompt_length : len(row.tokens)] = torch.tensor(getattr(row, name))
            return filled[:, 1:]

        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        surrogate(logprobs, column("old_log_probs"), column("advantages"), column("weights")).backward()

    def step() -> float:
        optimizer.zero_grad()
        for start in range(0, len(rows), micro_batch):
            micro_step(rows[start : start + micro_batch])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        return norm

    return step


def cpu_seconds(step: Step) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument("--prompts", type=int, default=1, help="prompts per step")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--answers", type=int, default=8, help="answers per prompt")
    parser.add_argument("--answer", type=int, nargs=2, default=(16, 128), help="least and most tokens of an answer")
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[2, 8], help="rows per padded forward")
    parser.add_argument("--attention", nargs="+", default=["sdpa", "eager"], help="Hugging Face's attention")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds after one to warm up")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="float32, bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in options.dtype:
        rows = drawn_rows(options, vocabulary=256)
        steps = {"slimectl": own_step(options.model, rows, dtype)}
        for attention in options.attention:
            for size in options.micro_batch:
                steps[f"{attention}, {size} rows"] = padded_step(options.model, rows, dtype, size, attention)
        norms = ", ".join(f"{step():.6g}" for step in steps.values())
        print(f"{dtype}: gradient norms {norms}", file=sys.stderr)
        rounds = [{name: cpu_seconds(step) for name, step in steps.items()} for _ in range(options.rounds)]
        medians = {name: statistics.median(times[name] for times in rounds) for name in steps}
        ours = medians.pop("slimectl")
        tokens = sum(len(row.tokens) for row in rows)
        print(f"{dtype}: slimectl {ours:.3f} s ({tokens / ours:.0f} tokens per CPU second); Hugging Face", end=" ")
        print("; ".join(f"{name} {seconds:.3f} s ({seconds / ours:.2f} times)" for name, seconds in medians.items()))


if __name__ == "__main__":
    main()
