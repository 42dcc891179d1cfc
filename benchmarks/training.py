"""A training step of both policies against the padded Hugging Face step that people write, in CPU seconds.

    python benchmarks/training.py --model DIR                                   # 8 answers of 16..128 to 256 tokens
    python benchmarks/training.py --model DIR --prompts 64 --prompt 20 --answer 4 16
    python benchmarks/training.py --model DIR --memory                          # peak memory instead, a process a side
    python benchmarks/training.py --model DIR --bound --dtype float32 --prompts 4 --prompt 94 --answer 48 48

All sides: one thread, the same rows, the same clipped surrogate, AdamW, one forward, backward and update. The Hugging
Face side is `model(input_ids, attention_mask)` padded to the longest row, `log_softmax` over its full logits, fused
AdamW; in bfloat16 a model in bfloat16. It is measured in every setting of --micro-batch and --attention, and the
fastest counts. Rounds alternate; medians are shown. The learning rate is 0, so that all gradient norms stay equal.

With --bound our policies are measured beside the machine's own matrix products instead: the step's FLOPs are 6 for each
weight of a linear layer and token that is computed (prefixes once), 6 for each weight of the head and state that
predicts a token, 12 for each head dimension and attention pair, and the bound is what they take at the rate of these
very products, forward and backward, in this process, just before the step: by the library that the policies call
(oneDNN or MKL), and by MKL too. Freed memory is kept, as in a run. Dense models.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import resource
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from slimectl.algorithms.packing import build_tries
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.lm_head import CHUNK_LOGITS
from slimectl.policies.onednn_linear import ROWS, add_product, is_faster, product
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.policies.pack_plan import plan_pack
from slimectl.runtime.process_memory import keep_freed_memory
from slimectl.types import TrainingSample

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


def drawn_rows(options: argparse.Namespace, vocabulary: int) -> list[TrainingSample]:
    draw = random.Random(0)
    rows = []
    for group in range(options.prompts):
        prompt = [draw.randrange(vocabulary) for _ in range(options.prompt)]
        for _ in range(options.answers):
            length = draw.randint(*options.answer)
            tokens = prompt + [draw.randrange(vocabulary) for _ in range(length)]
            advantages = [draw.choice([-1.0, 1.0])] * length
            rows.append(TrainingSample(tokens, length, [1e-3] * length, advantages, [0.0] * length, group=group))
    return rows


def own_step(name: str, model: Path, rows: list[TrainingSample], dtype: str, max_tokens: int) -> Step:
    options = TrainerOptions(optimizer=OptimizerOptions(lr=0.0), dtype=dtype, max_tokens_per_pack=max_tokens)
    policy = _policy(name)(model, HFCheckpoint(), options)
    for row, logprobs in zip(rows, policy.log_probs(rows), strict=True):
        row.old_log_probs = logprobs

    def step() -> float:
        policy.forward_backward(rows, Surrogate())
        return policy.optim_step()["grad_norm"]

    return step


def _policy(name: str) -> Any:
    if name == "fsdp":
        return FsdpPolicy
    from slimectl.policies.megatron.policy import MegatronPolicy

    return MegatronPolicy


@cache
def _hugging_face(model_dir: Path, dtype: str) -> tuple[Any, torch.optim.Optimizer]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    return model.train(), torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)


def padded_step(model_dir: Path, rows: list[TrainingSample], dtype: str, micro_batch: int, attention: str) -> Step:
    model, optimizer = _hugging_face(model_dir, dtype)

    def micro_step(rows: list[TrainingSample]) -> None:
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
        surrogate(logprobs, column("old_log_probs"), column("advantages"), column("loss_weights")).backward()

    def step() -> float:
        model.set_attn_implementation(attention)
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


def sides(options: argparse.Namespace, rows: list[TrainingSample], dtype: str) -> dict[str, Callable[[], Step]]:
    """How to build each side's step."""
    made: dict[str, Callable[[], Step]] = {
        name: partial(own_step, name, options.model, rows, dtype, options.max_tokens) for name in options.policy
    }
    for attention in options.attention:
        for size in options.micro_batch:
            made[f"{attention}, {size} rows"] = partial(padded_step, options.model, rows, dtype, size, attention)
    return made


def compare_times(options: argparse.Namespace, dtype: str) -> None:
    rows = drawn_rows(options, vocabulary=256)
    steps = {name: build() for name, build in sides(options, rows, dtype).items()}
    norms = ", ".join(f"{step():.6g}" for step in steps.values())
    print(f"{dtype}: gradient norms {norms}", file=sys.stderr)
    rounds = [{name: cpu_seconds(step) for name, step in steps.items()} for _ in range(options.rounds)]
    medians = {name: statistics.median(times[name] for times in rounds) for name in steps}
    tokens = sum(len(row.tokens) for row in rows)
    fastest = min(seconds for name, seconds in medians.items() if name not in options.policy)
    for name, seconds in medians.items():
        rate = f"{tokens / seconds:.0f} tokens per CPU second"
        print(f"{dtype}: {name}: {seconds:.3f} s, {rate}, {fastest / seconds:.2f} of the fastest Hugging Face")


@dataclass(frozen=True)
class Work:
    """Matrix products of a step: [rows, inner] by [inner, outer] for a number of layers, and FLOPs of its attention."""

    products: Mapping[tuple[int, int, int], int]
    """(rows, inner, outer) and how often."""
    attention: int
    tokens: int

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward: three products of each."""
        return self.attention + sum(6 * math.prod(shape) * count for shape, count in self.products.items())

    def seconds(self, library: str) -> float:
        """CPU seconds of all FLOPs at the rate of the products, each of which runs once in each of its three forms."""
        taken = sum(count * LIBRARIES[library](*shape) for shape, count in self.products.items())
        return taken * self.flops / (self.flops - self.attention)


def _onednn_seconds(rows: int, inner: int, outer: int) -> float:
    """CPU seconds of a linear layer's three products by oneDNN; a head's in chunks and parts, as it is computed."""
    part = min(rows, max(ROWS, CHUNK_LOGITS // outer // ROWS * ROWS))
    states, weight, grad = torch.rand(part, inner), torch.rand(outer, inner), torch.rand(part, outer)
    grad_weight = torch.zeros_like(weight)

    def run() -> None:
        product(states, weight)
        product(grad, weight.t())
        if part < rows:
            add_product(grad_weight, grad, states)
        else:
            product(states.t(), grad.t())

    run()
    return cpu_seconds(run) * rows / part


def _mkl_seconds(rows: int, inner: int, outer: int) -> float:
    """CPU seconds of a linear layer's three products, into memory that is there: outputs and both gradients."""
    states, weight, grad = torch.rand(rows, inner), torch.rand(outer, inner), torch.empty(rows, outer).fill_(1.0)
    grad_states, grad_weight = states.clone(), weight.clone()

    def run() -> None:
        torch.mm(states, weight.t(), out=grad)
        torch.mm(grad, weight, out=grad_states)
        torch.mm(grad.t(), states, out=grad_weight)

    run()
    return cpu_seconds(run)


LIBRARIES = {"oneDNN": _onednn_seconds, "MKL": _mkl_seconds}


def work(model_dir: Path, rows: list[TrainingSample], max_tokens: int) -> Work:
    """Count the products of a step that computes every prefix of the rows once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_dir)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tries = build_tries(rows, max_tokens=max_tokens)
    tokens = sum(trie.tokens for trie in tries)
    states = len(plan_pack(rows, tries).predictions.sources_U)
    head = model.get_output_embeddings()
    products: Counter[tuple[int, int, int]] = Counter()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            products[states if module is head else tokens, module.in_features, module.out_features] += 1
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    pairs = sum(trie.pairs for trie in tries)
    return Work(products, 12 * pairs * width * config.num_hidden_layers, tokens)


def compare_bound(options: argparse.Namespace, dtype: str) -> None:
    """Print CPU seconds of our steps as multiples of those of their matrix products."""
    keep_freed_memory()
    rows = drawn_rows(options, vocabulary=256)
    bound = work(options.model, rows, options.max_tokens)
    steps = {name: own_step(name, options.model, rows, dtype, options.max_tokens) for name in options.policy}
    norms = ", ".join(f"{step():.6g}" for step in steps.values())
    torch.set_default_dtype(getattr(torch, dtype))
    fast = is_faster(torch.device("cpu"), getattr(torch, dtype))
    bounds, seconds = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for _ in range(options.rounds):
        for library in LIBRARIES if fast else ["MKL"]:
            bounds[library].append(bound.seconds(library))
        for name, step in steps.items():
            seconds[name].append(cpu_seconds(step))
    read = sum(row.input_length for row in rows)
    flops, of_attention = bound.flops / 1e9, bound.attention / 1e9
    print(f"{dtype}: {bound.tokens} tokens of {read}, {flops:.0f} GFLOP, of attention {of_attention:.0f}")
    for library, least in bounds.items():
        median = statistics.median(least)
        print(f"{dtype}: their products by {library}: {median:.3f} s, {flops / median:.1f} GFLOP/s")
    for name, taken in seconds.items():
        ratios = [
            f"{statistics.median(step / bound for step, bound in zip(taken, least, strict=True)):.2f} of {library}"
            for library, least in bounds.items()
        ]
        print(f"{dtype}: {name}: {statistics.median(taken):.3f} s, times their products: {', '.join(ratios)}")
    print(f"{dtype}: gradient norms {norms}")


def compare_memory(options: argparse.Namespace, dtype: str) -> None:
    """Two steps of each side in a process of its own: its peak less what it held before it built anything."""
    names = list(sides(options, [], dtype))
    for name in names:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            print(f"{dtype}: {name}: {process.submit(_peak_mib, options, name, dtype).result():.0f} MiB")


def _peak_mib(options: argparse.Namespace, name: str, dtype: str) -> float:
    torch.set_num_threads(1)
    rows = drawn_rows(options, vocabulary=256)
    _policy("megatron")
    import transformers.models.auto.modeling_auto  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for row in rows:
        row.old_log_probs = [0.0] * row.response_length
    step = sides(options, rows, dtype)[name]()
    for _ in range(2):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory")
    parser.add_argument("--policy", nargs="+", default=["fsdp", "megatron"], help="fsdp, megatron")
    parser.add_argument("--prompts", type=int, default=1, help="prompts per step")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--answers", type=int, default=8, help="answers per prompt")
    parser.add_argument("--answer", type=int, nargs=2, default=(16, 128), help="least and most tokens of an answer")
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens of a pack of ours")
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[2, 8], help="rows per padded forward")
    parser.add_argument("--attention", nargs="+", default=["sdpa", "eager"], help="Hugging Face's attention")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds after one to warm up")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="float32, bfloat16")
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    parser.add_argument("--bound", action="store_true", help="measure our steps beside their own matrix products")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compare = compare_bound if options.bound else compare_memory if options.memory else compare_times
    for dtype in options.dtype:
        compare(options, dtype)


if __name__ == "__main__":
    main()
