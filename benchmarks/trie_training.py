"""A training step on recorded multi-turn sessions, prefixes computed once against every row alone.

    python benchmarks/trie_training.py --model DIR                      # CPU-seconds, loss and gradient difference
    python benchmarks/trie_training.py --model DIR --memory             # peak memory instead, a process a side

The embedded engine samples the answers, and sessions of the agents' endpoint record them; what a tool says is scripted.
Cases: `siblings`, answers to one prompt; `branches`, episodes of a tool use, of which each is one row; `turns`, the
same with one row for each turn; `forks`, one episode with several answers to each turn, of which one goes on;
`debate`, two speakers of whom each has a history of its own. Rounds of both sides alternate, one thread; medians are
shown. The learning rate is 0, so that all gradients stay equal. With `--rows FOLDER` recorded rows are written there,
and read from there the next time: another model may have sampled them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import multiprocessing
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from slimectl.algorithms.packing import build_tries
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.types import Completion, Sample, SamplingParams, Status, TrainingSample

CASES = ("siblings", "branches", "turns", "forks", "debate")
TASK = (
    "You are a careful accountant. A tool adds and looks up numbers: write one line, LOOKUP name or ADD a b, and wait"
    " for its result. Check every number twice, and name the total at the end. The ledger has rent, wages, travel,"
    " power, water, paper, repairs and taxes for twelve months."
)
MOTION = "The motion: a town should spend what it has left on a library and not on a road."


class Surrogate:
    """The clipped surrogate, 0.2 to either side."""

    needs_entropy = False

    def __call__(self, pack: Any) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = torch.exp(pack.logprobs_T - pack.old_logprobs_T)
        clipped = torch.minimum(ratio * pack.advantages_T, ratio.clamp(0.8, 1.2) * pack.advantages_T)
        return -(pack.weights_T * clipped).sum(), {}


@dataclasses.dataclass
class Recorder:
    """Records sessions with the answers of an engine."""

    options: argparse.Namespace

    def __post_init__(self) -> None:
        from transformers import AutoConfig

        from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
        from slimectl.runtime import builders

        self.tokenizer = builders.tokenizer(self.options.model)
        config = AutoConfig.from_pretrained(self.options.model, local_files_only=True)
        self.engine = EmbeddedEngine(config, self.tokenizer, EngineOptions(dtype=torch.bfloat16, max_context=2048))
        self.engine.load_weights(HFCheckpoint().read(self.options.model), version="0")

    def session(self, draw: random.Random) -> Any:
        from slimectl.agents.answer import AnswerReader
        from slimectl.agents.session import Session, SessionLimits

        async def generate(tokens: list[int], params: SamplingParams) -> Completion:
            seeded = dataclasses.replace(params, seed=draw.randrange(2**31))
            return await self.engine.generate(tokens, params=seeded)

        limits = SessionLimits(turns=10**6, response_tokens=10**9)
        return Session(self.tokenizer, AnswerReader(self.tokenizer), generate, SamplingParams(), limits)

    async def ask(self, session: Any, messages: list[dict[str, Any]], n: int = 1) -> str:
        """Ask for `n` answers; returns the text of the last, which is appended to the messages."""
        from slimectl.chats.requests import ChatRequest

        reply = await session.answer(ChatRequest(list(messages), max_tokens=self.options.answer, n=n))
        text = str(reply.answers[-1].parts.content or "")
        messages.append({"role": "assistant", "content": text})
        return text

    async def tool_use(self, session: Any, turns: int, answers: int, draw: random.Random) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": TASK},
            {"role": "user", "content": "What did wages and rent come to last year?"},
        ]
        for turn in range(turns):
            await self.ask(session, messages, answers)
            result = f"Result {turn + 1}: {draw.randrange(10**5)}. Next?"
            messages.append({"role": "user", "content": result})

    async def debate(self, session: Any, turns: int) -> None:
        histories: list[list[dict[str, Any]]] = [
            [{"role": "system", "content": f"{MOTION} Speak {side} it, in two sentences."}]
            for side in ("for", "against")
        ]
        said = "Begin."
        for turn in range(turns):
            history = histories[turn % 2]
            history.append({"role": "user", "content": said})
            said = await self.ask(session, history)

    async def sessions(self, case: str) -> list[Any]:
        count = 1 if case in ("forks", "siblings") else self.options.siblings
        return list(await asyncio.gather(*(self.record(case, random.Random(i)) for i in range(count))))

    async def record(self, case: str, draw: random.Random) -> Any:
        session, turns = self.session(draw), self.options.turns
        if case == "debate":
            await self.debate(session, turns)
        else:
            fan_out = self.options.siblings if case in ("forks", "siblings") else 1
            await self.tool_use(session, 1 if case == "siblings" else turns, fan_out, draw)
        return session


def recorded_rows(options: argparse.Namespace, case: str) -> list[TrainingSample]:
    """Record the sessions of a case, and make a row of every branch, or in `turns` of every turn."""
    recorder = Recorder(options)
    samples = []
    for session in asyncio.run(recorder.sessions(case)):
        if case == "turns":
            samples += [_of_turn(turn) for turn in session.tree.turns]
        else:
            samples += session.samples(Sample(status=Status.PENDING))
    draw = random.Random(1)
    return [_row(sample, draw.choice([-1.0, 1.0])) for sample in samples]


def _of_turn(turn: Any) -> Sample:
    answer = turn.completion
    return Sample(
        tokens=turn.tokens(), response_length=len(answer.tokens), rollout_log_probs=list(answer.log_probs),
        loss_mask=[1] * len(answer.tokens),
    )  # fmt: skip


def _row(sample: Sample, advantage: float) -> TrainingSample:
    count = sample.response_length
    weights = [1e-3 * mask for mask in sample.loss_mask or [1] * count]
    return TrainingSample(
        list(sample.tokens), count, weights, [advantage] * count, list(sample.rollout_log_probs or [])
    )


def new_trainer(options: argparse.Namespace, name: str, *, share: bool) -> Any:
    kind: Any = FsdpPolicy
    if name == "megatron":
        from slimectl.policies.megatron.policy import MegatronPolicy as kind
    trainer_options = TrainerOptions(
        optimizer=OptimizerOptions(lr=0.0, weight_decay=0.0, clip_grad=1e9), dtype=options.dtype,
        max_tokens_per_pack=options.max_tokens, share_prefixes=share,
    )  # fmt: skip
    return kind(options.model, HFCheckpoint(), trainer_options)


def gradients(trainer: Any) -> Iterator[Tensor]:
    """Yield the gradients of a trainer, in one order."""
    if hasattr(trainer, "chunks"):
        yield from (p.main_grad for chunk in trainer.chunks for p in chunk.parameters() if p.requires_grad)
    else:
        yield from trainer.masters.gradients()


def step(trainer: Any, rows: list[TrainingSample]) -> tuple[float, float, list[Tensor]]:
    """CPU-seconds of forward, backward and update, the loss, and a copy of the gradients."""
    start = time.process_time()
    loss = trainer.forward_backward(rows, Surrogate())["loss"]
    middle = time.process_time()
    grads = [grad.float().clone() for grad in gradients(trainer)]
    copied = time.process_time()
    trainer.optim_step()
    return middle - start + time.process_time() - copied, loss, grads


def compare_times(options: argparse.Namespace, name: str, rows: list[TrainingSample]) -> str:
    sides = {share: new_trainer(options, name, share=share) for share in (True, False)}
    rounds = [{share: step(trainer, rows) for share, trainer in sides.items()} for _ in range(options.rounds)]
    shared_s, alone_s = (statistics.median(steps[share][0] for steps in rounds) for share in sides)
    (_, shared_loss, shared_grads), (_, alone_loss, alone_grads) = rounds[0].values()
    difference, norm = (
        math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
        for grads in ([shared - alone for shared, alone in zip(shared_grads, alone_grads, strict=True)], alone_grads)
    )
    return (
        f"{alone_s:.2f} s alone, {shared_s:.2f} s shared, {alone_s / shared_s:.2f} times; loss differs by"
        f" {abs(shared_loss / alone_loss - 1):.1e}, gradient by {difference / norm:.1e}"
    )


def compare_memory(options: argparse.Namespace, name: str, rows: list[TrainingSample]) -> str:
    peaks = []
    for share in (False, True):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            peaks.append(process.submit(_peak_mib, options, name, rows, share).result())
    return f"{peaks[0]:.0f} MiB alone, {peaks[1]:.0f} MiB shared"


def _peak_mib(options: argparse.Namespace, name: str, rows: list[TrainingSample], share: bool) -> float:
    """Return the peak of a step less what the process held before it built anything."""
    torch.set_num_threads(1)
    if name == "megatron":
        import slimectl.policies.megatron.policy  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer = new_trainer(options, name, share=share)
    trainer.forward_backward(rows, Surrogate())
    trainer.optim_step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def rows_of(options: argparse.Namespace, case: str) -> list[TrainingSample]:
    """Read the rows of a case, or record and write them where there is a folder for them."""
    file = options.rows / f"{case}.json" if options.rows else None
    if file is not None and file.exists():
        return [TrainingSample(**row) for row in json.loads(file.read_text())]
    rows = recorded_rows(options, case)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face model directory with a chat template")
    parser.add_argument("--policy", nargs="*", default=["fsdp", "megatron"], help="fsdp, megatron; none: only record")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--siblings", type=int, default=8, help="attempts at a task, or answers to a turn")
    parser.add_argument("--turns", type=int, default=8, help="answers of an episode")
    parser.add_argument("--answer", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens of a pack")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds")
    parser.add_argument("--rows", type=Path, help="folder that keeps the recorded rows")
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in options.cases:
        rows = rows_of(options, case)
        tokens = sum(row.input_length for row in rows)
        unique = sum(trie.tokens for trie in build_tries(rows, max_tokens=options.max_tokens))
        print(f"{case}: {len(rows)} rows, {tokens} tokens, {unique} in tries ({tokens / unique:.2f})", flush=True)
        compare: Callable[..., str] = compare_memory if options.memory else compare_times
        for name in options.policy:
            print(f"{case}: {name} {options.dtype}: {compare(options, name, rows)}", flush=True)


if __name__ == "__main__":
    main()
