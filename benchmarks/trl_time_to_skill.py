"""TRL's GRPOTrainer on the task `quickstart` of `slimectl bench`, by its rules: CPU seconds to the target accuracy.

    python benchmarks/trl_time_to_skill.py --trl-python PATH
    python benchmarks/trl_time_to_skill.py --trl-python PATH --seeds 2 --setting fp32 --verbose

Each seed is first measured by slimectl, as `slimectl bench` does, then by TRL, from the warmed-up weights of that run
and with the prompts, rewards, lengths and settings of the task: a round of 64 prompts with 8 answers, one optimizer
step. TRL's seconds are those of its process from its start, plus those of slimectl's warm-up, which it did not repeat.
Evaluations are the task's too: TRL saves its weights and waits, and slimectl's engine answers in the process that reads
them. Neither the saving nor the evaluation is counted.

--setting is TRL's, as in benchmarks/grpo_step.py: fp32 or autocast (bf16=True), `,cb` for continuous batching, `,ROWS`
for a micro-batch. Groups whose rewards are equal are left out by slimectl, as the task says. TRL keeps them with an
advantage of 0, and divides by more answers; Adam takes most of that factor out of the update.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_step import ONE_THREAD, SAMPLES_PER_PROMPT, Case, Turns, trl_trainer

if TYPE_CHECKING:
    from slimectl.recipes.benchmark import BenchmarkTask
    from slimectl.runtime.benchmark import SeedResult
    from slimectl.settings import Settings

TASK = "quickstart"
SAME_IN_TRL = {
    "rollout.n_samples_per_prompt": SAMPLES_PER_PROMPT, "rollout.temperature": 1.0, "rollout.top_p": 1.0,
    "rollout.shuffle": False, "rollout.stop": [], "algorithm.name": "grpo", "algorithm.eps_clip": 0.2,
    "algorithm.kl_loss_coef": 0.0, "algorithm.grpo_std_normalization": True, "train.weight_decay": 0.0,
    "train.adam_beta1": 0.9, "train.adam_beta2": 0.98, "train.adam_eps": 1e-8, "train.clip_grad": 1.0,
    "train.min_lr": 0.0, "train.global_batch_size": None, "train.num_steps_per_rollout": None,
}  # fmt: skip
"""Settings of the task that `grpo_step.trl_config` has as constants."""


# --- TRL in its own process: a line out after each interval of steps, a line in lets it go on -------------------------


def trl_process(request: dict[str, Any]) -> None:
    """Train until nobody waits for more steps; save the weights where an evaluation is due."""
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    turns = Turns()

    class EvaluationPause(TrainerCallback):
        saving_s = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            self.pause(0, parts)

        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if state.global_step % request["interval"] == 0:
                self.pause(state.global_step, parts)

        def pause(self, step: int, parts: dict[str, Any]) -> None:
            before = cpu_seconds()
            parts["model"].save_pretrained(request["save"])
            parts["processing_class"].save_pretrained(request["save"])
            turns.told |= {"step": step, "cpu_s": before - self.saving_s}
            turns.done()
            self.saving_s += cpu_seconds() - before
            turns.wait()

    trl_trainer(request, turns, EvaluationPause()).train()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process since its start, and of those that it waited for."""
    return sum(os.times()[:4])


# --- the process that measures ----------------------------------------------------------------------------------------


def measure_slimectl(task: BenchmarkTask, seed: int, folder: Path) -> SeedResult:
    """Run the task as `slimectl bench` does; its warmed-up weights stay in the folder of the run."""
    from slimectl.runtime.benchmark import measure

    values = {"run.dir": str(folder), "run.name": run_name(seed)}
    return measure(task, TASK, values, seed=seed, on_evaluation=lambda evaluation: note("slimectl", seed, evaluation))


def measure_trl(task: BenchmarkTask, seed: int, options: argparse.Namespace, warmup_s: float) -> SeedResult:
    """Train by TRL from the warmed-up weights until an evaluation reaches the target."""
    from slimectl.runtime.benchmark import SeedResult, TimedAccuracy

    settings = task.settings({"run.seed": seed, "rollout.seed": seed})
    check_settings(settings)
    result, started = SeedResult(seed), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        request = trl_request(settings, Path(name), options.dir / run_name(seed) / "warmup", options.setting, seed)
        with subprocess.Popen(
            [options.trl_python, __file__, "--request", json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            text=True,
            env=os.environ | ONE_THREAD,
        ) as process:
            assert process.stdin
            assert process.stdout
            for line in process.stdout:
                message, before = json.loads(line), time.process_time()
                accuracy = held_out_accuracy(task, settings, Path(request["save"]), message["step"])
                result.evaluation_cpu_s += time.process_time() - before
                result.evaluations.append(TimedAccuracy(message["step"], accuracy, warmup_s + message["cpu_s"]))
                note("TRL", seed, result.evaluations[-1], message)
                result.reached = accuracy >= task.target.accuracy
                if result.reached or message["step"] == request["steps"]:
                    break
                process.stdin.write("\n")
                process.stdin.flush()
    if not result.evaluations or not (result.reached or result.evaluations[-1].round == request["steps"]):
        raise SystemExit("TRL's process ended before its last step; say --verbose to see why")
    first, last = result.evaluations[0], result.evaluations[-1]
    result.round, result.accuracy, result.cpu_s = last.round, last.accuracy, last.cpu_s
    result.wall_s = time.perf_counter() - started
    result.phases_cpu_s = {
        "start, load": first.cpu_s - warmup_s,
        "warm-up": warmup_s,
        "steps": last.cpu_s - first.cpu_s,
    }
    return result


def run_name(seed: int) -> str:
    return f"{TASK}-seed-{seed}"


def check_settings(settings: Settings) -> None:
    """Raise SystemExit if the task has other settings than TRL gets here."""
    values = settings.model_dump(by_alias=True)
    for key, value in SAME_IN_TRL.items():
        section, _, name = key.partition(".")
        if values[section][name] != value:
            raise SystemExit(f"{TASK}: {key} is {values[section][name]!r}, and TRL's is {value!r} here")


def trl_request(settings: Settings, folder: Path, model: Path, setting: str, seed: int) -> dict[str, Any]:
    """Return what TRL's process needs, and write the prompts of all its steps into a folder."""
    from slimectl.runtime import builders

    steps, prompts_per_step = settings.run.num_rollout, settings.run.rollout_batch_size
    assert steps is not None
    with (folder / "prompts.jsonl").open("w") as file:
        prompts = builders.prompts(settings, list(settings.rollout.data), epochs=None)
        for prompt, _ in zip(prompts, range(steps * prompts_per_step), strict=False):
            row = {"prompt": prompt.text, "label": prompt.label, "metadata": prompt.metadata}
            print(json.dumps(row), file=file)
    case = Case(
        data=settings.rollout.data[0],
        prompts=prompts_per_step,
        tokens=settings.rollout.max_response_len,
        reward=str(settings.score.rm_type),
        lr=settings.train.lr,
        decay=settings.train.lr_decay_style,
    )
    return {
        "case": dataclasses.asdict(case), "setting": setting, "model": str(model), "steps": steps, "seed": seed,
        "prompts": str(folder / "prompts.jsonl"), "save": str(folder / "weights"), "interval": settings.eval.interval,
    }  # fmt: skip


def held_out_accuracy(task: BenchmarkTask, settings: Settings, model: Path, step: int) -> float:
    """Return the accuracy of saved weights on the held-out prompts of the task, as a run evaluates it."""
    from slimectl.runtime import builders

    dataset, tokenizer = builders.dataset(settings, task.target.dataset), builders.tokenizer(model)
    generator = builders.generator(settings, builders.engine(settings, model, tokenizer), tokenizer)
    prompts = builders.prompts(dataset.settings, [settings.eval.sources[dataset.name]], shuffle=False)
    metrics: dict[str, float] = {}
    list(dataset.evaluate(prompts, generator, metrics, executor=builders.LocalExecutor(), rollout_id=step))
    return metrics[task.metric]


def note(side: str, seed: int, evaluation: Any, message: dict[str, float] | None = None) -> None:
    details = "".join(f", {key} {message[key]:.3f}" for key in ("reward", "answer") if message and key in message)
    place = f"{side}, seed {seed}, round {evaluation.round}"
    print(f"{place}: accuracy {evaluation.accuracy:.3f} after {evaluation.cpu_s:.1f} CPU s{details}", file=sys.stderr)


def show(side: str, result: SeedResult, ratio: str = "") -> None:
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.phases_cpu_s.items() if name != "eval")
    seconds = f"{'' if result.reached else '>'}{result.cpu_s:.1f}"
    best = max(evaluation.accuracy for evaluation in result.evaluations)
    cells = f"{result.seed:4} {side:>9} {result.accuracy:9.3f} {best:6.3f} {result.round:6} {seconds:>7} {ratio:>6}"
    print(f"{cells}  {phases}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--request"]:
        trl_process(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=sys.executable, metavar="PATH", help="python of TRL's environment")
    parser.add_argument("--seeds", default="1,2,3", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--setting", default="autocast", help="TRL's setting, as in benchmarks/grpo_step.py")
    parser.add_argument("--dir", default=Path("runs/trl"), type=Path, help="folder of slimectl's runs")
    parser.add_argument("--verbose", action="store_true", help="let TRL write to stderr")
    options = parser.parse_args()

    import torch

    from slimectl.recipes import benchmark

    torch.set_num_threads(1)
    task = benchmark.load(TASK)
    print(f"{task.title}: {task.target.dataset} accuracy of {task.target.accuracy}; TRL's setting is {options.setting}")
    print("seed      side  accuracy   best  round   CPU s  times")
    results: dict[str, list[SeedResult]] = {"slimectl": [], "TRL": []}
    for seed in options.seeds:
        results["slimectl"].append(measure_slimectl(task, seed, options.dir))
        show("slimectl", results["slimectl"][-1])
        warmup_s = results["slimectl"][-1].phases_cpu_s["warm-up"]
        results["TRL"].append(measure_trl(task, seed, options, warmup_s))
        show("TRL", results["TRL"][-1], f"{results['TRL'][-1].cpu_s / results['slimectl'][-1].cpu_s:.2f}")
    medians = {
        side: statistics.median(result.cpu_s if result.reached else math.inf for result in measured)
        for side, measured in results.items()
    }
    ratio = medians["TRL"] / medians["slimectl"]
    print(f"median    slimectl {medians['slimectl']:.1f}, TRL {medians['TRL']:.1f}, times {ratio:.2f}")


if __name__ == "__main__":
    main()
