"""Compares trainer and engine with transformers for each causal architecture, and writes the table of docs/models.md.

    python tests/family_table.py                # every architecture, a process for each
    python tests/family_table.py gemma3 gpt_oss # print the rows of these

Each figure is compared with code that does not use slimectl: transformers' own forward, a row at a time without
padding, and a plain loop of torch.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from causal_models import VOCABULARY, model_types, write_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from slimectl.algorithms.registry import policy_loss
from slimectl.architectures.config import raw_config
from slimectl.checkpoints.create import byte_tokenizer
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import first_line
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.runtime.builders.engines import engine as build_engine
from slimectl.runtime.builders.engines import engine_path
from slimectl.settings import Settings
from slimectl.settings.rollout_algorithms import Grpo
from slimectl.types import Completion, SamplingParams, TrainingSample

PAGE = Path(__file__).parent.parent / "docs/models.md"
MARK = "<!-- table of families: python tests/family_table.py -->"
TOLERANCE = 1e-5
ENGINE_TOLERANCE = 2e-5
OPTIMIZER = OptimizerOptions(lr=0.5, eps=1.0, weight_decay=0.0, clip_grad=0.0)
"""With this large epsilon, the step is proportional to the gradient. Otherwise tiny gradients decide the error."""


@dataclass(frozen=True)
class Result:
    """One row: which path trainer and engine take, and the largest errors. A failure replaces a figure."""

    model_type: str
    trainer: str
    engine: str
    log_probs: float | str
    """Difference of log-probabilities: the trainer's to transformers'."""
    sampled: float | str
    """Difference of log-probabilities: the engine's sampled tokens to the trainer's."""
    step: float | str
    """Norm of the difference of one GRPO step to a plain loop, relative to the norm of the step."""
    saved: float | str
    """Difference of log-probabilities: the saved model in transformers to the trained policy."""

    @property
    def passes(self) -> bool:
        limits = (TOLERANCE, ENGINE_TOLERANCE, TOLERANCE, TOLERANCE)
        figures = (self.log_probs, self.sampled, self.step, self.saved)
        return all(not isinstance(f, str) and f <= limit for f, limit in zip(figures, limits, strict=True))


def rows_of(responses: Sequence[tuple[list[int], list[int]]]) -> list[TrainingSample]:
    """Return GRPO rows for (prompt, response) pairs: groups of two with advantages, and old log-probabilities."""
    draw = random.Random(1)
    tokens = sum(len(response) for _, response in responses)
    return [
        TrainingSample(
            tokens=prompt + response,
            response_length=len(response),
            loss_weights=[1 / tokens] * len(response),
            advantages=[1.0 if i % 2 else -0.7] * len(response),
            old_log_probs=[-5.2 + 0.4 * draw.random() for _ in response],
            group=i // 2,
        )
        for i, (prompt, response) in enumerate(responses)
    ]


def plain_log_probs(model: Any, row: TrainingSample) -> Tensor:
    """Return the log-probabilities [R] of a row's response, from transformers' forward on this row alone."""
    tokens_1T = torch.tensor([row.tokens])
    log_p_TV = model(input_ids=tokens_1T, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return log_p_TV.gather(1, tokens_1T[0, 1:, None])[-row.response_length :, 0]


def plain_step(model: Any, rows: Sequence[TrainingSample]) -> None:
    """Make one step of GRPO (arXiv:2402.03300) with clipped ratios, a row at a time."""
    for row in rows:
        ratio_R = torch.exp(plain_log_probs(model, row) - torch.tensor(row.old_log_probs))
        advantages_R = torch.tensor(row.advantages)
        gain_R = torch.minimum(ratio_R * advantages_R, ratio_R.clamp(0.8, 1.2) * advantages_R)
        (-(gain_R * torch.tensor(row.loss_weights)).sum()).backward()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    torch.optim.AdamW(parameters, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=0.0).step()


def sample(engine: Any, prompts: Sequence[list[int]]) -> list[Completion]:
    """Sample two responses for each prompt, all at once."""

    async def all_responses() -> list[Completion]:
        requests = [
            engine.generate(prompt, params=SamplingParams(max_tokens=8 + 2 * i, seed=10 * i + sibling, ignore_eos=True))
            for i, prompt in enumerate(prompts)
            for sibling in range(2)
        ]
        return await asyncio.gather(*requests)

    return asyncio.run(all_responses())


def attempt(check: Any, *arguments: Any) -> Any:
    """Return the result of a check, or its error in one line."""
    try:
        return check(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error, 160)}"


def compare(model_type: str, folder: Path, *, reference_folder: Path | None = None) -> Result:
    """Compare trainer and engine with transformers for a small random model of a type.

    It is written to `folder`, unless there is one with the weights of `reference_folder`.
    """
    if reference_folder is None:
        write_model(model_type, folder)
        byte_tokenizer().save_pretrained(folder)
    reference: Any = AutoModelForCausalLM.from_pretrained(reference_folder or folder, dtype=torch.float32).eval()
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in (5, 12, 20)]
    pairs = [(prompt, [draw.randrange(3, VOCABULARY) for _ in range(6 + i)]) for prompt in prompts for i in range(2)]
    rows = rows_of(pairs)
    policy = attempt(FsdpPolicy, folder, HFCheckpoint(), TrainerOptions(optimizer=OPTIMIZER))
    if isinstance(policy, str):
        return Result(model_type, "none", "none", policy, "", "", "")
    log_probs = attempt(_log_prob_error, policy, reference, rows)
    engine_name, sampled = "none", attempt(_engine_error, policy, folder, prompts)
    if isinstance(sampled, tuple):
        engine_name, sampled = sampled
    step, saved = attempt(_step_error, policy, reference, rows, folder / "saved"), ""
    if not isinstance(step, str):
        saved = attempt(_saved_error, policy, folder / "saved", rows)
    return Result(
        model_type, "general" if policy.model.obstacle else "packed", engine_name, log_probs, sampled, step, saved
    )


def _log_prob_error(policy: FsdpPolicy, reference: Any, rows: list[TrainingSample]) -> float:
    with torch.no_grad():
        expected = [plain_log_probs(reference, row) for row in rows]
    return _largest(policy.log_probs(rows), expected)


def _engine_error(policy: FsdpPolicy, folder: Path, prompts: list[list[int]]) -> tuple[str, float]:
    settings = Settings.model_validate({"model": {"path": str(folder)}, "engine": {"dtype": "float32"}})
    engine = build_engine(settings, folder, byte_tokenizer())
    completions = sample(engine, prompts)
    pairs = [(prompts[i // 2], completion.tokens) for i, completion in enumerate(completions)]
    error = _largest(policy.log_probs(rows_of(pairs)), [torch.tensor(c.log_probs) for c in completions])
    return engine_path(settings, raw_config(folder)), error


def _largest(found: list[list[float]], expected: Sequence[Tensor]) -> float:
    return max((torch.tensor(f) - e).abs().max().item() for f, e in zip(found, expected, strict=True))


def _step_error(policy: FsdpPolicy, reference: Any, rows: list[TrainingSample], saved: Path) -> float:
    """Make the step on both sides, and save the trained policy."""
    before = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    policy.forward_backward(rows, policy_loss(Grpo(), rows))
    policy.optim_step()
    plain_step(reference, rows)
    saved.mkdir()
    policy.save(saved)
    trained = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    squares, total = 0.0, 0.0
    for name, parameter in trained.named_parameters():
        expected = dict(reference.named_parameters())[name]
        squares += (parameter - expected).double().square().sum().item()
        total += (expected - before[name]).double().square().sum().item()
    return float((squares / total) ** 0.5)


def _saved_error(policy: FsdpPolicy, saved: Path, rows: list[TrainingSample]) -> float:
    trained = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    return _log_prob_error(policy, trained, rows)


def in_process(model_type: str) -> Result:
    """Compare in a process of its own, because a few architectures end the process."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("fork")) as pool:
        try:
            return pool.submit(compare, model_type, Path(folder)).result()
        except Exception as error:
            return Result(model_type, "none", "none", f"{type(error).__name__}: {first_line(error, 160)}", "", "", "")


def markdown(results: Sequence[Result]) -> str:
    """Return the table."""
    lines = ["| model type | trainer | engine | log-probs | sampled | step | saved |", "|---|---|---|---|---|---|---|"]
    for result in results:
        cells = [f"{cell:.0e}" if isinstance(cell, float) else cell for cell in astuple(result)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def table_types() -> list[str]:
    """Return the model types of the table in docs/models.md."""
    return re.findall(r"^\| (\S+) \|", PAGE.read_text().partition(MARK)[2], re.MULTILINE)


def main(arguments: list[str]) -> None:
    results = []
    for model_type in arguments or model_types():
        results.append(in_process(model_type))
        print(results[-1], flush=True)
    if not arguments:
        before, _, after = PAGE.read_text().partition(MARK)
        rest = re.sub(r"\A\n*(\|.*\n)*", "", after)
        PAGE.write_text(f"{before}{MARK}\n\n{markdown(results)}\n{rest}")


if __name__ == "__main__":
    main(sys.argv[1:])
