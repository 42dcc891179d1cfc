"""The same GRPO updates by TRL's GRPOTrainer and by slimectl: do loss and gradient norm agree?

    python benchmarks/agreement.py --model TINY --trl-python PATH
    python benchmarks/agreement.py --model SMOLLM2 --trl-python PATH --prompts 2 --tokens 16 --updates 3 --lr 2e-5

slimectl samples answers once, of ragged lengths, in float32, and each gets a drawn reward. Both sides then make the
same updates from the same weights with AdamW, and tell the loss and the norm of the gradient before it is clipped.
Several updates go on one batch: from the second on, probabilities have left those that sampled, and bounds hold. What
corrects for an engine that disagrees gets a batch an update, with log-probabilities moved at random.

Shown are loss and norm, slimectl's and TRL's, what share of the tokens slimectl clipped and corrected, and how far the
sides are apart. Where they define a thing differently, the setting is taken that is the same in both:
  - TRL divides by a group's deviation + 1e-4, slimectl by it + 1e-6: rewards are some hundreds, so neither counts.
  - A mean over answers is slimectl's default and TRL's "grpo"; over tokens calculate_per_token_loss and "dapo" or
    "cispo"; a fixed denominator fixed_length and the max_completion_length of "dr_grpo".
  - Both keep groups without signal, and one group has equal rewards.
  - TRL's epsilon_high of cispo is the largest weight, slimectl's eps_clip_high its distance from 1.
  - TRL's divergence is k3; its entropy bonus is a mean over tokens whatever the loss.
  - TRL corrects only where vLLM sampled: its trainer is told so, and the answers come by its rollout_func.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

BETAS, EPSILON = (0.9, 0.98), 1e-6
"""AdamW's; with a smaller epsilon the rounding of gradients near 0 becomes whole steps, apart from the second on."""

MOVED = 0.4
"""Deviation of the engine's log-probabilities from the policy's, where they are to disagree."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One algorithm in the words of both."""

    name: str
    slimectl: dict[str, Any]
    trl: dict[str, Any]
    corrected: bool = False
    """A new batch for every update, sampled by an engine that disagrees."""

    scale: float = 500.0
    """Of the rewards: a group's deviation, where it divides, is so large that nothing added to it counts."""


def correcting(slimectl: dict[str, Any], mode: str, low: float | None, high: float) -> Case:
    """By another level, or mode, of the weights that make up for an engine."""
    bounds = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    return Case(
        f"grpo, {mode}",
        {"use_tis": True, "tis_clip_low": low or 0.0, "tis_clip": high} | slimectl,
        {"vllm_importance_sampling_mode": mode} | bounds,
        corrected=True,
    )


def cases(tokens: int) -> list[Case]:
    kl = {"kl_loss_coef": 0.1, "kl_loss_type": "k3"}
    return [
        Case("grpo", {}, {}),
        Case("grpo, tight bounds", {"eps_clip": 0.02}, {"epsilon": 0.02}),
        Case("grpo, dual clip", {"eps_clip": 0.02, "eps_clip_c": 1.03}, {"epsilon": 0.02, "delta": 1.03}),
        Case("grpo, no deviation", {"grpo_std_normalization": False}, {"scale_rewards": "none"}, scale=1.0),
        Case("grpo, KL in the loss", kl, {"beta": 0.1, "use_bias_correction_kl": False}),
        Case("grpo, unbiased KL", kl | {"use_unbiased_kl": True}, {"beta": 0.1, "use_bias_correction_kl": True}),
        Case("grpo, off-policy mask", {"use_opsm": True}, {"off_policy_mask_threshold": 1e-4}),
        Case(
            "dr_grpo",
            {"name": "dr_grpo", "fixed_length": tokens},
            {"loss_type": "dr_grpo", "scale_rewards": "none"},
            scale=1.0,
        ),
        Case("dapo", {"name": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
        Case(
            "dapo, entropy bonus",
            {"name": "dapo", "entropy_coef": 0.1},
            {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.1},
        ),
        Case(
            "gspo",
            {"name": "gspo"},
            {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        ),
        Case("cispo", {"name": "cispo", "eps_clip_high": 0.02}, {"loss_type": "cispo", "epsilon_high": 1.02}),
        Case("sapo", {"name": "sapo"}, {"loss_type": "sapo"}),
        correcting({}, "token_truncate", None, 1.5),
        correcting({"tis_mode": "mask"}, "token_mask", 0.5, 2.0),
        correcting({"tis_level": "sequence"}, "sequence_truncate", None, 2.0),
        correcting({"tis_level": "sequence", "tis_mode": "mask"}, "sequence_mask", 0.5, 2.0),
    ]


# --- the samples ------------------------------------------------------------------------------------------------------


def sampled(given: argparse.Namespace) -> list[list[Any]]:
    """A batch of samples for every update, with rewards, and log-probabilities that the model gave them."""
    from slimectl.algorithms.scoring import REFERENCE
    from slimectl.runtime import builders
    from slimectl.stages.prompt_groups import PromptSource
    from slimectl.stages.rollout import rollout
    from slimectl.stages.score import attach_log_probs

    settings = slimectl_settings(given, {})
    tokenizer, start = builders.tokenizer(given.model), Path(given.model)
    engine = builders.engine(settings, start, tokenizer)
    size = given.prompts * given.answers
    generator = builders.generator(settings, engine, tokenizer)
    drawn = rollout(PromptSource(builders.prompts(settings, [given.data]), generator))
    answers = islice(drawn, size * given.updates)
    samples = list(attach_log_probs(answers, builders.frozen(settings, start), REFERENCE))
    if len(samples) < size * given.updates:
        raise SystemExit(f"{given.data}: {len(samples)} answers, {size * given.updates} are needed")
    random = Random(1)
    for i, sample in enumerate(samples):
        sample.reward = 1.0 if i % size < given.answers else random.gauss(0.0, 1.0)
        sample.rollout_log_probs = sample.ref_log_probs
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def fed(case: Case, batches: list[list[Any]]) -> list[list[Any]]:
    """The batches as a case has them: one that serves for every update, or each with an engine that disagrees."""
    random = Random(2)
    made = batches if case.corrected else batches[:1]
    return [[_as_seen(sample, case, random) for sample in batch] for batch in made]


def _as_seen(sample: Any, case: Case, random: Random) -> Any:
    log_probs = sample.rollout_log_probs
    if case.corrected:
        log_probs = [value + random.gauss(0.0, MOVED) for value in log_probs]
    return dataclasses.replace(sample, rollout_log_probs=log_probs, reward=case.scale * sample.reward)


# --- slimectl ---------------------------------------------------------------------------------------------------------


def slimectl_settings(given: argparse.Namespace, algorithm: dict[str, Any]) -> Any:
    from slimectl.settings.layers import Layer
    from slimectl.settings.loading import resolve

    values = {
        "rollout": {"n_samples_per_prompt": given.answers, "max_response_len": given.tokens, "shuffle": False},
        "engine": {"dtype": "float32"},
        "score": {"rm_type": "exact"},
        "train": {
            "lr": given.lr,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_eps": EPSILON,
            "max_tokens_per_gpu": given.pack,
        },
        "algorithm": {"name": "grpo"} | algorithm,
        "run": {"rollout_batch_size": given.prompts},
    }
    return resolve([Layer("benchmark", values)]).settings


def by_slimectl(case: Case, batches: list[list[Any]], given: argparse.Namespace) -> list[dict[str, float]]:
    from slimectl.runtime import builders
    from slimectl.stages.advantages import Models
    from slimectl.stages.train import train

    own_log_probs = {} if case.corrected else {"use_rollout_logprobs": True}
    settings = slimectl_settings(given, case.slimectl | own_log_probs)
    policy = builders.policy(settings, Path(given.model), total_steps=given.updates)
    every = batches * (1 if case.corrected else given.updates)
    reports = train((sample for batch in every for sample in batch), Models(policy), settings)
    return [
        {
            "loss": report.metrics["train/loss"],
            "grad_norm": report.metrics["train/grad_norm"],
            "clipped": report.metrics["train/pg_clipfrac"],
            "corrected": report.metrics.get("train/tis_clipfrac", 0.0),
        }
        for report in reports
    ]


# --- TRL --------------------------------------------------------------------------------------------------------------


def trl_side(job: dict[str, Any]) -> None:
    """Every case of the job; their reports go to a file."""
    import torch

    torch.set_num_threads(1)
    given = argparse.Namespace(**job["given"])
    reports = {}
    for one in job["cases"]:
        case = Case(**one["case"])
        reports[case.name] = by_trl(case, one["batches"], given)
    Path(job["out"]).write_text(json.dumps(reports))


def by_trl(case: Case, batches: list[list[dict[str, Any]]], given: argparse.Namespace) -> list[dict[str, float]]:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    losses: list[float] = []
    norms: list[float] = []

    class Recorded(GRPOTrainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())  # the log would round it
            return loss

    class Norms(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "grad_norm" in logs:
                norms.append(float(logs["grad_norm"]))

    prompts = [{"prompt": str(i)} for i in range(given.prompts * len(batches))]
    trainer = Recorded(
        model=given.model,
        reward_funcs=lambda completions, reward, **_: reward,
        args=trl_config(case, given),
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(given.model),
        callbacks=[Norms()],
        rollout_func=lambda prompts, trainer: recorded(prompts, batches),
    )
    if case.corrected:
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer.train()
    return [{"loss": loss, "grad_norm": norm} for loss, norm in zip(losses, norms, strict=True)]


def recorded(prompts: list[str], batches: list[list[dict[str, Any]]]) -> dict[str, list[Any]]:
    """What TRL takes for answers to `prompts`: the number of a group, as often as the group has answers."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for sample in (sample for batch in batches for sample in batch):
        groups.setdefault(str(sample["group"]), []).append(sample)
    chosen = [groups[prompt][prompts[:at].count(prompt)] for at, prompt in enumerate(prompts)]
    return {name: [one[name] for one in chosen] for name in ("prompt_ids", "completion_ids", "logprobs", "reward")}


def trl_config(case: Case, given: argparse.Namespace) -> Any:
    from trl import GRPOConfig

    same = {"loss_type": "grpo", "beta": 0.0, "epsilon": 0.2, "num_iterations": 1 if case.corrected else given.updates}
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        max_steps=given.updates,
        per_device_train_batch_size=given.prompts * given.answers,
        gradient_accumulation_steps=1,
        num_generations=given.answers,
        max_completion_length=given.tokens,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        learning_rate=given.lr,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPSILON,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **(same | case.trl),
    )


# --- both -------------------------------------------------------------------------------------------------------------


def trl_reports(
    chosen: list[Case], batches: list[list[Any]], given: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """In TRL's environment, in one process: its imports take longest."""
    folder = Path(tempfile.mkdtemp())
    asked = [{"case": dataclasses.asdict(case), "batches": plain(fed(case, batches), given)} for case in chosen]
    job = {"given": vars(given), "cases": asked, "out": str(folder / "reports.json")}
    (folder / "job.json").write_text(json.dumps(job))
    command = [given.trl_python, __file__, "--job", str(folder / "job.json")]
    quiet = None if given.verbose else subprocess.DEVNULL
    if subprocess.run(command, stdout=quiet, stderr=quiet, check=False).returncode:
        raise SystemExit("TRL's side failed; say --verbose to see why")
    return json.loads((folder / "reports.json").read_text())


def plain(batches: list[list[Any]], given: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Samples as TRL's side reads them."""
    return [
        [
            {
                "group": number * given.prompts + at // given.answers,
                "prompt_ids": sample.tokens[: sample.prompt_length],
                "completion_ids": sample.tokens[sample.prompt_length :],
                "logprobs": sample.rollout_log_probs,
                "reward": sample.reward,
            }
            for at, sample in enumerate(batch)
        ]
        for number, batch in enumerate(batches)
    ]


def apart(one: float, other: float) -> float:
    """How far two numbers lie apart, relative to the larger; a loss may cancel to 0, so below 0.01 relative to that."""
    return abs(one - other) / max(abs(one), abs(other), 0.01)


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        trl_side(json.loads(Path(sys.argv[2]).read_text()))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory that both start from")
    parser.add_argument("--trl-python", default=sys.executable, metavar="PATH", help="python of TRL's environment")
    parser.add_argument("--data", default="slimectl.recipes.larger_number:prompts?seed=0&size=400", help="prompts")
    parser.add_argument("--prompts", type=int, default=8, help="prompts an update")
    parser.add_argument("--answers", type=int, default=4, help="answers per prompt")
    parser.add_argument("--tokens", type=int, default=24, help="most tokens of an answer")
    parser.add_argument("--updates", type=int, default=4, help="updates of each case")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--pack", type=int, default=8192, help="tokens of a pack of slimectl's")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cases whose name contains one of these")
    parser.add_argument("--within", type=float, default=1e-4, help="largest difference that passes")
    parser.add_argument("--verbose", action="store_true", help="let TRL write to stderr")
    given = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    chosen = [case for case in cases(given.tokens) if not given.only or any(text in case.name for text in given.only)]
    batches = sampled(given)
    theirs = trl_reports(chosen, batches, given)
    print(f"{'case':>28} {'loss':>25} {'gradient norm':>25} clipped, corrected, apart")
    widest = max(compare(case, by_slimectl(case, fed(case, batches), given), theirs[case.name]) for case in chosen)
    print(f"{len(chosen)} cases, {given.updates} updates each: at most {widest:.1e} apart")
    if not widest <= given.within:
        raise SystemExit(f"more than {given.within:g} apart")


def compare(case: Case, ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """Print what both found, update by update; the widest difference."""
    widest = 0.0
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        differences = [apart(one[key], other[key]) for key in ("loss", "grad_norm")]
        shown = " ".join(f"{one[key]:12.6f} {other[key]:12.6f}" for key in ("loss", "grad_norm"))
        held = f"{one['clipped']:6.1%} {one['corrected']:6.1%}"
        print(f"{case.name:>26} {number} {shown} {held}  {max(differences):.1e}", flush=True)
        widest = max(widest, *differences)
    return widest


if __name__ == "__main__":
    main()
