"""A whole GRPO step, answers to weights, beside TRL's GRPOTrainer: CPU seconds a sample, one thread each.

    python benchmarks/grpo_step.py compare --model SMOLLM2 --trl-python PATH
    python benchmarks/grpo_step.py chat --model SMOLLM2 --trl-python PATH
    python benchmarks/grpo_step.py spell --model WARMED_UP --trl-python PATH --rounds 38 --accuracy

Every side is a process of its own, from the same weights, with the same prompts, rewards, lengths, learning rates and
loss: clipped surrogate 0.2, mean over samples of each one's mean, advantages over the group's deviation, no divergence
from a reference, AdamW (0.9, 0.98), gradients clipped at 1. They take turns, a step each, so that a machine that slows
down slows all. Counted is all of a step: sampling, grading, forward, backward, update, weights to the engine. The
first steps (--skip) and loading are not. Shown are medians, and the median of the ratios of neighbouring steps.

A side is `slimectl:ENGINE,TRAIN[,all]` in fp32 or bf16, `all` training also on groups whose rewards are equal; or
`trl:SETTING[,cb][,ROWS]` with fp32, autocast (bf16=True) or bf16 (weights too), `cb` transformers' continuous batching,
ROWS a micro-batch (all rows where not given). TRL recomputes no activations here, and pads as little as it can.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
ROOT = Path(__file__).resolve().parent.parent
SAMPLES_PER_PROMPT = 8
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SIDES = {
    # 64 rows of TRL's full logits take more than 10 GB: a micro-batch of 8 is its fastest setting that fits.
    "compare": ["slimectl:bf16,bf16", "slimectl:bf16,bf16,all", "trl:bf16,8"],
    "chat": ["slimectl:bf16,bf16", "slimectl:bf16,bf16,all", "trl:bf16,8"],
    "spell": ["slimectl:fp32,fp32", "trl:fp32", "trl:autocast"],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What both sides are given."""

    data: str
    prompts: int
    tokens: int
    reward: str
    lr: float
    decay: str = "constant"
    stop: str = ""
    chat: bool = False
    held_out: str = ""


CASES = {
    "compare": Case(
        "slimectl.recipes.larger_number:prompts?seed=0&size=2000", 8, 6, "exact", 1e-5, stop="\n",
        held_out="slimectl.recipes.larger_number:prompts?seed=1&size=128",
    ),
    "chat": Case("slimectl.recipes.larger_number:prompts?seed=0&shots=0&size=2000", 8, 48, "contains", 1e-5, chat=True),
    "spell": Case(
        "slimectl.recipes.spelling:prompts?seed=1&size=8000&max_word_len=4", 64, 16, "reasoning_gym", 4e-4, "linear",
        held_out="slimectl.recipes.spelling:prompts?split=held_out&seed=3&size=256&max_word_len=4",
    ),
}  # fmt: skip


# --- one side in its own process: a line in lets it take a step, a line out tells what the step cost ------------------


class Turns:
    """Waits for a turn, then tells what was done in it. Nothing but these lines may reach stdout."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.told: dict[str, float] = {}
        self.started = 0.0

    def wait(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit("nobody waits for more steps")
        self.started = time.process_time()

    def done(self) -> None:
        self.told["seconds"] = time.process_time() - self.started
        print(json.dumps(self.told), file=self.out, flush=True)
        self.told = {}


def slimectl_side(given: dict[str, Any], turns: Turns) -> None:
    from slimectl.runtime import builders
    from slimectl.stages.advantages import Models
    from slimectl.stages.prompt_groups import PromptSource
    from slimectl.stages.rounds import sampled_rounds
    from slimectl.stages.run import run, streamed

    case, settings, folder = Case(**given["case"]), slimectl_settings(given), Path(given["model"])
    tokenizer = builders.tokenizer(folder)
    policy = builders.policy(settings, folder, total_steps=given["steps"])
    engine = builders.engine(settings, folder, tokenizer, load=False)
    prompts, executor = builders.prompts(settings, [given["prompts"]]), builders.executor(settings)
    source = PromptSource(prompts, builders.generator(settings, engine, tokenizer))
    make_rounds = partial(sampled_rounds, source, builders.reward(settings), settings, executor=executor)
    rounds, sync = streamed(make_rounds, executor, settings.run), builders.InProcessSync(policy, engine)
    reports = run(rounds, Models(policy), sync, settings)
    for _ in range(given["steps"]):
        turns.wait()
        report = next(reports)
        rewards = [float(sample.reward) for sample in report.samples]  # type: ignore[arg-type]
        answers = [sample.response_length for sample in report.samples]
        turns.told |= {
            "samples": len(answers),
            "answer": statistics.fmean(answers),
            "reward": statistics.fmean(rewards),
        }
        turns.told["prompt"] = statistics.fmean(sample.prompt_length for sample in report.samples)
        turns.told["trained"] = report.metrics.get("train/global_batch_size", 0.0) / (case.prompts * SAMPLES_PER_PROMPT)
        turns.told["rollout"] = report.timings["perf/rollout_time"]
        turns.told["train"] = report.timings["perf/train_time"]
        turns.done()
    if given["save"]:
        Path(given["save"]).mkdir()
        policy.save(Path(given["save"]))


def slimectl_settings(given: dict[str, Any]) -> Any:
    from slimectl.settings.layers import Layer
    from slimectl.settings.loading import resolve

    case = Case(**given["case"])
    engine, train, *rest = given["setting"].split(",")
    tokens = {"n_samples_per_prompt": SAMPLES_PER_PROMPT, "max_response_len": case.tokens}
    values = {
        "rollout": tokens | ({"stop": [case.stop]} if case.stop else {}),
        "engine": {"dtype": DTYPES[engine], "max_running_requests": case.prompts * SAMPLES_PER_PROMPT},
        "score": {"rm_type": case.reward},
        "train": {"lr": case.lr, "lr_decay_style": case.decay, "dtype": DTYPES[train]},
        "algorithm": {"drop_zero_std_groups": "all" not in rest},
        "run": {"rollout_batch_size": case.prompts, "num_rollout": given["steps"]},
    }
    return resolve([Layer("benchmark", values)]).settings


def trl_side(given: dict[str, Any], turns: Turns) -> None:
    from transformers import TrainerCallback

    class Turn(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.done()
            if state.global_step < state.max_steps:
                turns.wait()

    trainer = trl_trainer(given, turns, Turn())
    trainer.train()
    if given["save"]:
        trainer.model.generation_config.eos_token_id = trainer.processing_class.eos_token_id
        trainer.save_model(given["save"])


def trl_trainer(given: dict[str, Any], turns: Turns, callback: Any) -> Any:
    """Return TRL's trainer with the model, prompts and reward of the case."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    case = Case(**given["case"])
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    dtype = torch.bfloat16 if given["setting"].startswith("bf16") else torch.float32
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=dtype)
    if case.stop:
        (stop,) = tokenizer(case.stop)["input_ids"]
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, stop]
    rows = [json.loads(line) for line in Path(given["prompts"]).read_text().splitlines()]
    columns = [{"prompt": r["prompt"], "label": r["label"], "metadata": json.dumps(r["metadata"])} for r in rows]
    return GRPOTrainer(
        model=model,
        reward_funcs=trl_reward(case, turns),
        args=trl_config(case, given),
        train_dataset=Dataset.from_list(columns),
        processing_class=tokenizer,
        callbacks=[callback],
    )


def trl_config(case: Case, given: dict[str, Any]) -> Any:
    from trl import GRPOConfig

    setting, *rest = given["setting"].split(",")
    samples = case.prompts * SAMPLES_PER_PROMPT
    micro_batch = next((int(part) for part in rest if part.isdecimal()), samples)
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        seed=given.get("seed", 42),
        use_cpu=True,
        bf16=setting == "autocast",
        max_steps=given["steps"],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=case.tokens,
        use_transformers_continuous_batching="cb" in rest,
        gradient_checkpointing=False,
        pad_to_multiple_of=None,
        shuffle_dataset=False,
        beta=0.0,
        loss_type="grpo",
        learning_rate=case.lr,
        lr_scheduler_type=case.decay,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        logging_steps=given["steps"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def trl_reward(case: Case, turns: Turns) -> Callable[..., list[float]]:
    sys.path.insert(0, str(ROOT))  # TRL's environment needs only what grades: nothing for numbers, else reasoning-gym
    from slimectl.rewards import verifier
    from slimectl.types import Sample

    grade = verifier(case.reward)

    def reward(
        completions: list[str], completion_ids: list[list[int]], label: list[str], metadata: list[str], **_: Any
    ) -> list[float]:
        graded = zip(completions, label, metadata, strict=True)
        rewards = [float(grade(Sample(response=t, label=y, metadata=json.loads(m)))) for t, y, m in graded]  # type: ignore[arg-type]
        turns.told |= {"samples": len(rewards), "answer": statistics.fmean(map(len, completion_ids))}
        turns.told["reward"] = statistics.fmean(rewards)
        return rewards

    return reward


# --- the rounds -------------------------------------------------------------------------------------------------------


class Side:
    """A side's process, which takes a step when it is asked to."""

    def __init__(self, name: str, options: argparse.Namespace, case: Case, prompts: Path, save: Path | None) -> None:
        kind, _, setting = name.partition(":")
        self.steps: list[dict[str, float]] = []
        given = {
            "kind": kind,
            "setting": setting,
            "case": dataclasses.asdict(case),
            "model": str(options.model),
            "prompts": str(prompts),
            "steps": options.skip + options.rounds,
            "save": str(save) if save else "",
        }
        python = options.trl_python if kind == "trl" else sys.executable
        self.process = subprocess.Popen(
            [python, __file__, "--side", json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            text=True,
            env=os.environ | ONE_THREAD,
        )

    def step(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args}: ended; say --verbose to see why")
        self.steps.append(json.loads(line))


def written_prompts(options: argparse.Namespace, case: Case, into: Path) -> None:
    """The prompts of all steps as JSON lines, chats as the text that the model reads."""
    from slimectl.runtime import builders

    tokenizer, settings = builders.tokenizer(options.model), _settings(case)
    count = case.prompts * (options.skip + options.rounds)
    drawn: Iterator[Any] = builders.prompts(settings, [case.data])
    with into.open("w") as out:
        for prompt, _ in zip(drawn, range(count), strict=False):
            text = prompt.text
            if case.chat:
                asked = [{"role": "user", "content": text}]
                text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            print(json.dumps({"prompt": text, "label": prompt.label, "metadata": prompt.metadata}), file=out)


def _settings(case: Case) -> Any:
    given = {"case": dataclasses.asdict(case), "setting": "fp32,fp32", "steps": 1}
    return slimectl_settings(given)


def accuracy(case: Case, model: Path) -> float:
    """On held-out prompts, by slimectl's evaluation."""
    from slimectl.runtime import builders
    from slimectl.stages.evaluate import HeldOutDataset

    settings, tokenizer = _settings(case), builders.tokenizer(model)
    engine, executor = builders.engine(settings, model, tokenizer), builders.LocalExecutor()
    prompts = builders.prompts(settings, [case.held_out], shuffle=False)
    generator, metrics = builders.generator(settings, engine, tokenizer), dict[str, float]()
    dataset = HeldOutDataset("held_out", settings, builders.reward(settings))
    list(dataset.evaluate(prompts, generator, metrics, executor=executor))
    return metrics["eval/held_out_accuracy"]


def show(sides: dict[str, Side], skip: int) -> None:
    kept = {name: side.steps[skip:] for name, side in sides.items()}
    print(f"{'side':>22} {'s/step':>8} {'ms/sample':>10} {'answer':>7} {'reward':>7} {'trained':>8}  times slimectl's")
    own = [name for name in kept if name.startswith("slimectl")]
    for name, steps in kept.items():
        seconds = statistics.median(step["seconds"] for step in steps)
        each = statistics.median(step["seconds"] / step["samples"] for step in steps)
        means = [statistics.fmean(step.get(key, 1.0) for step in steps) for key in ("answer", "reward", "trained")]
        ratios = []
        for ours in own if name not in own else []:
            pairs = zip(steps, kept[ours], strict=True)
            ratios.append(f"{statistics.median(a['seconds'] / b['seconds'] for a, b in pairs):.2f} ({ours})")
        shown = f"{name:>22} {seconds:8.3f} {1000 * each:10.2f} {means[0]:7.2f} {means[1]:7.3f} {means[2]:8.0%}"
        print(shown, "", ", ".join(ratios), flush=True)


def measure(options: argparse.Namespace, case: Case) -> None:
    folder = Path(tempfile.mkdtemp())
    written_prompts(options, case, folder / "prompts.jsonl")
    names = options.sides or SIDES[options.case]
    saved = {name: folder / f"side{i}" if options.accuracy else None for i, name in enumerate(names)}
    sides = {name: Side(name, options, case, folder / "prompts.jsonl", saved[name]) for name in names}
    for done in range(options.skip + options.rounds):
        for name, side in sides.items():
            side.step()
            print(f"step {done + 1}: {name} {side.steps[-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
    show(sides, options.skip)
    for side in sides.values():
        if side.process.wait():
            raise SystemExit("a side failed after its steps; say --verbose to see why")
    if options.accuracy:
        found = {"start": options.model} | {name: path for name, path in saved.items() if path}
        told = ", ".join(f"{name} {accuracy(case, path):.3f}" for name, path in found.items())
        print(f"held-out accuracy after {options.skip + options.rounds} steps: {told}")


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        import torch

        torch.set_num_threads(1)
        given = json.loads(sys.argv[2])
        (trl_side if given["kind"] == "trl" else slimectl_side)(given, Turns())
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory that all sides start from")
    parser.add_argument("--trl-python", default=sys.executable, metavar="PATH", help="python of TRL's environment")
    parser.add_argument("--sides", nargs="+", metavar="SIDE", help="what is compared, in place of the case's own list")
    parser.add_argument("--skip", type=int, default=2, help="first steps, not counted")
    parser.add_argument("--rounds", type=int, default=5, help="steps counted")
    parser.add_argument("--prompts", type=int, help="prompts a step, in place of the case's own number")
    parser.add_argument("--accuracy", action="store_true", help="evaluate what each side has become")
    parser.add_argument("--verbose", action="store_true", help="let the sides write to stderr")
    options = parser.parse_args()
    case = CASES[options.case]
    measure(options, dataclasses.replace(case, prompts=options.prompts or case.prompts))


if __name__ == "__main__":
    main()
