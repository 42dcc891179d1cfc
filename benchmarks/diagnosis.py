"""Healthy runs and induced faults: what `slimectl diagnose` finds in them, and after how many rounds.

    python benchmarks/diagnosis.py --out FOLDER [--seed 1] [--page]

Runs that are in FOLDER are not made again. --judge only reads them, for example after a detector has changed. Every
run takes 3 to 40 CPU seconds, all of them half an hour. Two faults need Linux namespaces.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from slimectl.diagnosis.diagnosis import Diagnosis, read_lines
from slimectl.recipes.spelling import prompts

ROUNDS = 40
TASK = "slimectl.recipes.spelling:prompts"
WORDS = f"{TASK}?seed=1&size=50000&max_word_len=4"

HEALTHY: dict[str, str] = {
    "plain": "",
    "64 prompts": "run.rollout_batch_size=64",
    "group of 4": "rollout.n_samples_per_prompt=4 train.lr=2.5e-4",
    "group of 16": "rollout.n_samples_per_prompt=16 run.rollout_batch_size=16",
    "constant learning rate": "train.lr_decay_style=constant",
    "half the learning rate": "train.lr=2.5e-4",
    "warm-up and cosine": "train.lr_decay_style=cosine train.lr_warmup_iters=5",
    "sampling one round ahead": "run.async_level=1",
    "KL in the loss": "algorithm.kl_loss_coef=0.01",
    "gspo": "algorithm.name=gspo",
    "dapo": "algorithm.name=dapo",
    "reinforce++": "algorithm.name=reinforce_plus_plus train.lr=2e-4",
    "rloo": "algorithm.name=rloo",
    "kept samples": "run.keep_samples=true",
    "four steps a round": "train.num_steps_per_rollout=4",
    "16 prompts": "run.rollout_batch_size=16",
    "dr_grpo": "algorithm.name=dr_grpo",
    "cispo": "algorithm.name=cispo train.num_steps_per_rollout=2 train.lr=2.5e-4",
    "evaluation every 5 rounds": "eval.interval=5",
    "entropy bonus": "algorithm.entropy_coef=1e-3",
    "own warm-up": "",
    "sft": "",
    "dpo": "",
    "200 rounds": "run.num_rollout=200",
    # Only in the held-out set:
    "sapo": "algorithm.name=sapo",
    "gmpo": "algorithm.name=gmpo train.num_steps_per_rollout=2",
    "opo": "algorithm.name=opo",
    "maxrl": "algorithm.name=maxrl",
    "topr": "algorithm.name=topr",
    "ppo": "algorithm.name=ppo algorithm.critic_lr=1e-3",
    "reinforce++ baseline": "algorithm.name=reinforce_plus_plus_baseline",
    "KL in the reward": "algorithm.name=reinforce_plus_plus algorithm.kl_coef=0.01 train.lr=2e-4",
    "two rounds ahead": "run.async_level=2",
    "temperature 0.8": "rollout.temperature=0.8",
    "top-p 0.95": "rollout.top_p=0.95",
    "longer words": f"rollout.data={WORDS.replace('len=4', 'len=5')} train.lr=1e-4",
    "500 words": f"rollout.data={WORDS.replace('50000', '500')}",
    "exact": "score.rm_type=exact",
    "filter": "rollout.dynamic_sampling_filter_path=slimectl.stages.filters:nonzero_std",
    "all groups kept": "algorithm.drop_zero_std_groups=false",
    "importance sampling": "algorithm.use_tis=true",
    "checkpoint every 10 rounds": "run.save_interval=10 run.async_save=true",
    "partial rollouts": "rollout.partial_rollout=true rollout.over_sampling_batch_size=40",
    "muon": "train.optimizer=muon train.lr=1e-3",
    "weight decay": "train.weight_decay=0.1",
    "lora": "train.lora_rank=8 train.lr=2e-3",
}
"""Variants of the quickstart by name: assignments of settings."""
ONLY_HELD_OUT = list(HEALTHY).index("sapo")
TUNING = [*list(HEALTHY)[:ONLY_HELD_OUT], *["plain"] * 5]
"""Runs with which thresholds were set."""
HELD_OUT = [*list(HEALTHY)[ONLY_HELD_OUT - 4 :], *["plain"] * 12, *list(HEALTHY)[1 : ONLY_HELD_OUT - 4]]
"""Runs of other seeds, and of more variants."""


HEALTHY_ROUNDS, FAULTY_ROUNDS = 20, 25
MISTAKES = Path(__file__).with_name("diagnosis_faults.py")
PAGE = Path(__file__).parent.parent / "docs" / "diagnosis.md"
KEPT = PAGE.parent.parent / "tests" / "diagnosis" / "recorded.json"
KEPT_RUNS = ("healthy/055_evaluation_every_5_rounds", "faults/reward_is_gamed", "faults/weights_never_pushed")
READ = re.compile(
    r"rollout/(raw_reward|entropy|response_len/(mean|median|max)|truncated_ratio|zero_std/count_1|staleness/m.*)"
    r"|rollout/(duplicate_ratio|ngram_repetition|length_reward_correlation|advantages(/std)?)"
    r"|number|train/(grad_norm|lr|approxkl|ratio_max|train_rollout_(k3|logprob_abs_diff))|eval/held_out_(accuracy|avg_reward).*"
)
"""Metrics of the runs that are kept for tests."""
FROM_FILES = ("sft", "dpo")
"""Variants that train on a file instead of sampling."""


@dataclass(frozen=True)
class Fault:
    """A mistake: the kinds of findings of which one must appear, and the settings that make it."""

    kinds: tuple[str, ...]
    assigned: tuple[str, ...]
    begins: int = HEALTHY_ROUNDS + 1
    """First round with the mistake. 1 makes a run of its own instead of a resume after HEALTHY_ROUNDS."""
    machine: str = ""
    """A shell command that makes a smaller machine, in a mount namespace of the run's own: $SMALL is an empty folder
    for a disk."""


def reward(name: str) -> str:
    return f"score.custom_rm_path={MISTAKES}:{name}"


def agent(name: str) -> str:
    return f"rollout.custom_generate_function_path={MISTAKES}:{name}"


FOUR_STEPS = "train.num_steps_per_rollout=4"
FAULTS: dict[str, Fault] = {
    "learning rate x 100": Fault(("kl-growth", "ratio-growth", "reward-collapse"), ("train.lr=5e-2",)),
    "learning rate x 10, four steps": Fault(
        ("kl-growth", "ratio-growth", "reward-collapse", "clip-fraction"), ("train.lr=5e-3", FOUR_STEPS)
    ),
    "learning rate 0": Fault(("learning-rate-zero",), ("train.lr=0",)),
    "schedule ended": Fault(
        ("learning-rate-zero",), ("train.lr_decay_style=linear", "train.lr_decay_iters=25"), begins=26
    ),
    "wrong label column": Fault(("no-signal",), ("rollout.label_key=length", "score.rm_type=exact")),
    "wrong prompt column": Fault(("no-signal", "reward-collapse"), ("rollout.input_key=length",)),
    "constant reward": Fault(("no-signal",), (reward("constant"),)),
    "reward pays length": Fault(("reward-follows-length", "length-growth"), (reward("longer"),)),
    "reward charges length": Fault(("length-shrinkage",), (reward("shorter"),)),
    "reward is for something else": Fault(("gaming", "evaluation-collapse"), (reward("vowels"),)),
    "reward has the wrong sign": Fault(("gaming", "evaluation-collapse"), (reward("negated"),)),
    "reward is gamed": Fault(("gaming",), (reward("lenient"), "eval.rm_type=exact"), begins=1),
    "reward is too lenient": Fault(("all-solved", "no-signal"), (reward("any_letter"),)),
    "few prompts, and all are easy": Fault(
        ("gaming", "all-solved"), ("rollout.data={solved}", "run.on_data_change=warn")
    ),
    "broken chat template": Fault(("no-signal", "reward-collapse"), ("rollout.apply_chat_template=true",)),
    "engine at another temperature": Fault(("mismatch",), (agent("cooler"),)),
    "repetition penalty": Fault(("mismatch",), ("rollout.repetition_penalty=1.5",)),
    "weights never pushed": Fault(("staleness",), ("sync.update_weights_interval=1000", "eval.interval=1000")),
    "8 rounds ahead": Fault(("staleness",), ("run.async_level=8",)),
    "layers frozen": Fault(("frozen",), ("train.freeze_params_name_list=layers|embed|lm_head",)),
    "tiny clip": Fault(("clip-fraction",), ("algorithm.eps_clip=1e-6", FOUR_STEPS)),
    "no clip, 16 steps": Fault(
        ("gradient-spikes", "ratio-growth", "kl-growth", "reward-collapse"),
        ("algorithm.eps_clip=1", "algorithm.eps_clip_high=100", "train.num_steps_per_rollout=16", "train.lr=2e-3"),
    ),
    "slow reward": Fault(("slow-grader",), (reward("slow"),)),
    "reward times out": Fault(
        ("verifier-timeouts",), (reward("stuck"), "score.wall_timeout_s=0.2", "score.workers=1", "run.num_rollout=26")
    ),
    "reward returns None": Fault(("verifier-errors",), (reward("undecided"), "score.none_reward=skip")),
    "agent raises": Fault(("verifier-errors",), (agent("failing"),)),
    "responses cut": Fault(("truncation",), ("rollout.max_response_len=3",)),
    "temperature 0.1": Fault(("entropy-collapse", "duplicates"), ("rollout.temperature=0.1",)),
    "entropy bonus too high": Fault(("entropy-explosion",), ("algorithm.entropy_coef=0.5",)),
    "copied responses": Fault(("duplicates",), (agent("copied"),)),
    "one part dominates": Fault(
        ("component-dominates",),
        (f'score.rm=[{{type="exact"}},{{path="{MISTAKES}:longer",name="style",weight=5.0}}]',),
    ),
    "rewards nearly divided by 0": Fault(
        ("gradient-spikes",), (reward("nearly_divided_by_zero"), "algorithm.grpo_std_normalization=false")
    ),
    "random advantages": Fault(
        ("reward-collapse", "entropy-collapse"),
        (f"train.custom_advantage_function_path={MISTAKES}:noisy_advantages",),
    ),
    "slow tool": Fault(("waiting",), (agent("waiting"), "run.num_rollout=36")),
    "one slow response": Fault(("waiting", "straggler"), (agent("straggling"), "run.num_rollout=36")),
    "disk fills": Fault(
        ("disk",),
        ("run.save_interval=1", "run.keep_checkpoints=none", "run.dir={small}"),
        begins=1,
        machine="mount -t tmpfs -o size=400m none $SMALL",
    ),
    "reward leaks memory": Fault(
        ("memory",),
        (reward("leaking"),),
        machine="mount -t tmpfs none /sys/fs/cgroup",
    ),
    "large reference": Fault(("slow-log-probs",), ("algorithm.kl_loss_coef=1e-4", "algorithm.ref_load={large}")),
    "learning rate / 1000": Fault(
        ("flat-reward", "flat-evaluation"), ("train.lr=5e-7", "run.num_rollout=80"), begins=1
    ),
    "wrong verifier from the start": Fault(
        ("no-signal",), ("score.custom_rm_path=none", "score.rm_type=math"), begins=1
    ),
    "eight prompts": Fault(("gaming", "all-solved"), ("rollout.data={words}@[0:8]",), begins=1),
    "cold start": Fault(
        ("no-signal",), ("model.path={cold}", "score.custom_rm_path=none", "score.rm_type=exact"), begins=1
    ),
}


@dataclass(frozen=True)
class Trial:
    """One run of the campaign: its folder's name, the kind of trial, and the settings that it changes."""

    name: str
    variant: str
    seed: int
    assigned: str

    @property
    def assignments(self) -> list[str]:
        return [part for setting in self.assigned.split() for part in ("-s", setting)]


def healthy(variants: list[str], seed: int) -> Iterator[Trial]:
    """Yield a trial of every variant, each under its own seed."""
    for i, variant in enumerate(variants):
        yield Trial(f"{i:03}_{variant.replace(' ', '_').replace('+', 'p')}", variant, seed + i, HEALTHY[variant])


def run_healthy(trial: Trial, folder: Path, start: Path) -> None:
    """Make a healthy run in `folder`, from the warmed-up model unless it warms up itself."""
    own = ["--name", trial.name, "-s", f"run.dir={folder}", "-s", "track.plot=false", *trial.assignments]
    if trial.variant in FROM_FILES:
        samples = demonstrations(folder, trial.seed) if trial.variant == "sft" else scored(folder, start, trial.seed)
        size = ["-s", "train.global_batch_size=128", "-s", "train.lr=2e-4"]
        slimectl("train", str(samples), "--model", str(start), "--algorithm", trial.variant, *own, *size)
        return
    size = ["-s", "run.rollout_batch_size=32", "-s", f"run.num_rollout={ROUNDS}"]
    model = [] if trial.variant == "own warm-up" else ["--model", str(start), "-s", "sft_warmup.data="]
    slimectl("run", "quickstart", "--seed", str(trial.seed), *size, *model, *own)


def demonstrations(folder: Path, seed: int) -> Path:
    """Return a file of words and their spelling backward."""
    file = folder / f"demonstrations-{seed}.jsonl"
    rows = prompts(seed=seed, size=40 * 128, max_word_len=4)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def scored(folder: Path, start: Path, seed: int) -> Path:
    """Return a file of the first model's own responses, with rewards."""
    responses, file = folder / f"responses-{seed}.jsonl", folder / f"scored-{seed}.jsonl"
    source = f"{TASK}?seed={seed}&size=1600&max_word_len=4"
    short = ["-s", "rollout.max_response_len=16", "-s", "engine.max_running_requests=512"]
    responses.write_text(slimectl("rollout", "--model", str(start), "--data", source, "-n", "8", *short))
    file.write_text(slimectl("score", str(responses), "--rm-type", "reasoning_gym"))
    return file


def run_fault(fault: Fault, run: Path, start: Path, seed: int) -> None:
    """Make a run with a mistake in the folder `run`: the healthy rounds before it once, then a resume of a copy."""
    shared = run.parent / f"shared-{seed}"
    files = shared_files(shared, start, seed)
    own = [part for setting in fault.assigned for part in ("-s", filled(setting, files))]
    healthy_rounds = settings_of_faults(files)
    quickstart = ["run", "quickstart", "-s", f"model.path={start}", "--seed", str(seed), *healthy_rounds]
    command = slimectl if not fault.machine else partial(on_small_machine, fault.machine, run, Path(files["small"]))
    if fault.begins == 1:
        rounds = ["-s", f"run.num_rollout={HEALTHY_ROUNDS + FAULTY_ROUNDS}"]
        command(*quickstart, "--name", run.name, "-s", f"run.dir={run.parent}", *rounds, *own)
        return
    before = shared / "before"
    if not (before / "latest").exists():
        slimectl(*quickstart, "--name", "before", "-s", f"run.dir={shared}", "-s", f"run.num_rollout={HEALTHY_ROUNDS}")
    shutil.copytree(before, run, symlinks=True)
    command("run", "--resume", str(run), "-s", f"run.num_rollout={HEALTHY_ROUNDS + FAULTY_ROUNDS}", *own)


def on_small_machine(prepare: str, run: Path, small: Path, *arguments: str) -> None:
    """Run a command in a mount namespace, and keep the records of its run, even if it fails, as on a full disk."""
    keep = 'cd $SMALL; for file in */run.toml */*.json*; do mkdir -p "$RUN"; cp "$file" "$RUN"; done'
    script = f'set -e; {prepare}; cd /; "$@" || true; {keep} 2>/dev/null || true'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, "-m", "slimectl", *arguments]
    environment = os.environ | {"SMALL": str(small), "RUN": str(run)}
    subprocess.run(command, env=environment, check=True, capture_output=True)


def shared_files(folder: Path, start: Path, seed: int) -> dict[str, str]:
    """Return the files that settings of faults name, by the name that stands for them. Write those that are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("words.jsonl", "held_out.jsonl", "solved.jsonl", "large", "cold", "small")
    files = {name: folder / name for name in names}
    files["small"].mkdir(exist_ok=True)
    for name, split, size in (("words.jsonl", "train", 20_000), ("held_out.jsonl", "held_out", 256)):
        if not files[name].exists():
            rows = prompts(split, seed=seed, size=size, max_word_len=4)
            lines = [{"prompt": row["prompt"], "label": row["label"], "length": f"{len(row['label'])}"} for row in rows]
            files[name].write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if not files["cold"].exists():
        slimectl("models", "create", "tiny", str(files["cold"]))
    if not files["large"].exists():
        create_large(files["cold"], files["large"])
    if not files["solved.jsonl"].exists():
        files["solved.jsonl"].write_text(solved(start, str(files["words.jsonl"])))
    return {name.partition(".")[0]: str(file) for name, file in files.items()}


def create_large(tiny: Path, folder: Path) -> None:
    """Create a random model with the tokenizer of another and ten times its layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "manifest.json"))
    config = AutoConfig.from_pretrained(tiny)
    config.num_hidden_layers *= 10
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def solved(model: Path, words: str) -> str:
    """Return the lines of the prompts to which all of 8 responses are right."""
    short = ["-s", "rollout.max_response_len=16", "-s", "engine.max_running_requests=512"]
    samples = slimectl("rollout", "--model", str(model), "--data", f"{words}@[:2000]", "-n", "8", *short)
    right: dict[str, int] = Counter()
    for line in samples.splitlines():
        sample = json.loads(line)
        right[sample["prompt"]] += sample["response"] == sample["label"]
    rows = (json.loads(line) for line in Path(words).read_text().splitlines()[:2000])
    return "".join(f"{json.dumps(row)}\n" for row in rows if right[row["prompt"]] == 8)


def settings_of_faults(files: dict[str, str]) -> list[str]:
    """Return the settings of a healthy run on which faults are induced."""
    assigned = (
        f"rollout.data={files['words']}", reward("similarity"), "run.rollout_batch_size=32", "sft_warmup.data=",
        "train.lr_decay_style=constant",
        f"eval.data={{held_out={json.dumps(files['held_out'])}}}", "eval.rm_type=exact",
        "eval.interval=5", "track.plot=false",
    )  # fmt: skip
    return [part for setting in assigned for part in ("-s", setting)]


def filled(setting: str, files: dict[str, str]) -> str:
    """Return a setting with the files that it names in braces."""
    for name, file in files.items():
        setting = setting.replace(f"{{{name}}}", file)
    return setting


def warmed_up(folder: Path, seed: int) -> Path:
    """Return the quickstart's model before its first round."""
    run = folder / f"start-{seed}"
    if not (run / "latest").exists():
        nothing_learned = ["-s", "run.num_rollout=1", "-s", "train.lr=0", "-s", f"run.dir={folder}"]
        slimectl("run", "quickstart", "--seed", str(seed), "--name", run.name, *nothing_learned)
    return run / "latest"


def slimectl(*arguments: str) -> str:
    """Return what a command printed. It runs in a fork, which need not import torch again.

    Raises RuntimeError with the end of its messages if it fails.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as messages:
        child = os.fork()
        if not child:
            run_command(arguments, output.fileno(), messages.fileno())
        _, status = os.waitpid(child, 0)
        output.seek(0)
        messages.seek(0)
        if status:
            raise RuntimeError(messages.read()[-1000:])
        return output.read()


def run_command(arguments: tuple[str, ...], output: int, messages: int) -> NoReturn:
    """Run a command in this process, with its output in files, and end the process."""
    from slimectl.cli import main

    os.dup2(output, 1)
    os.dup2(messages, 2)
    sys.argv = ["slimectl", *arguments]
    code: int | str | None = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sets", default="healthy_tuning,healthy,faults", help="sets of runs to make")
    parser.add_argument("--only", default="", help="names of the runs to make, separated by semicolons")
    parser.add_argument("--judge", action="store_true", help="make no run, only judge those in the folder")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/diagnosis.md")
    parser.add_argument("--records", action="store_true", help="write the records of three runs for the tests")
    options = parser.parse_args()
    out = options.out.absolute()
    for name in options.sets.split(",") if not options.judge else ():
        make_runs(name, out, options.seed, only=set(filter(None, options.only.split(";"))))
    lines = judge(out, options.seed)
    print("\n".join(lines))
    if options.page:
        write_page(lines)
    if options.records:
        KEPT.write_text(json.dumps({run: columns_of(out / run) for run in KEPT_RUNS}) + "\n", encoding="utf-8")


def make_runs(name: str, out: Path, seed: int, *, only: set[str]) -> None:
    """Make the runs of a set that the folder lacks. Each forks from this process, which imports torch once."""
    import slimectl.runtime.run  # noqa: F401

    for trial, run, make in planned(name, out, seed):
        if (run / "done").exists() or (only and trial not in only):
            continue
        shutil.rmtree(run, ignore_errors=True)
        run.parent.mkdir(parents=True, exist_ok=True)
        started = cpu_seconds()
        try:
            make()
        except RuntimeError as error:
            print(f"{trial}: failed: {error}", flush=True)
            continue
        (run / "done").touch()
        print(f"{trial}: {cpu_seconds() - started:.0f} s", flush=True)


def cpu_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def planned(name: str, out: Path, seed: int) -> Iterator[tuple[str, Path, Callable[[], None]]]:
    """Yield the trials of a set: name, folder and the function that makes the run."""
    if name == "faults":
        for fault in FAULTS:
            run = out / name / fault.replace(" ", "_").replace(",", "")
            yield fault, run, partial(make_fault, fault, run, out, seed)
        return
    is_held_out = name == "healthy"
    for trial in healthy(HELD_OUT if is_held_out else TUNING, 1000 * seed + (520 if is_held_out else 0)):
        start = 10 * seed + trial.seed % 4 + 4 * is_held_out
        yield trial.name, out / name / trial.name, partial(make_healthy, trial, out, name, start)


def make_fault(name: str, run: Path, out: Path, seed: int) -> None:
    run_fault(FAULTS[name], run, warmed_up(out / "starts", 10 * seed + 9), seed)


def make_healthy(trial: Trial, out: Path, folder: str, start: int) -> None:
    run_healthy(trial, out / folder, warmed_up(out / "starts", start))


@dataclass(frozen=True)
class Report:
    """A finding that a run would have reported after a round."""

    kind: str
    round: int
    title: str


def reports_of(run: Path) -> list[Report]:
    """Return the findings of a recorded run in the order in which it would have reported them."""
    sections = tomllib.loads((run / "run.toml").read_text(encoding="utf-8"))
    settings = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    is_recorded = run.name.endswith(FROM_FILES)
    diagnosis, number, reports = Diagnosis(settings, run, is_recorded=is_recorded), 0, []
    for line in read_lines(run):
        number = int(line.get("rollout_id", number))
        begun = [finding for finding in diagnosis.observe(line) if finding.lasts]
        reports += [Report(finding.kind, number, finding.title) for finding in begun]
    return reports


def judge(out: Path, seed: int) -> list[str]:
    """Return the lines of the page about the runs in a folder, and print the findings."""
    command = f"`python benchmarks/diagnosis.py --out FOLDER --seed {seed} --page`"
    lines = [
        f"{command} makes runs like the quickstart, healthy ones and ones with a mistake,",
        "and writes this section. A run got worse if a held-out mean fell by more than two standard errors.",
        "",
    ]
    for name, what in (("healthy", "Healthy runs"), ("healthy_tuning", "Healthy runs with which thresholds were set")):
        runs = [done.parent for done in sorted((out / name).glob("*/done"))]
        alarms = {run.name: reports for run in runs if (reports := reports_of(run))}
        worse = {run.name for run in runs if got_worse(run)}
        if not runs:
            continue
        lines.append(
            f"- {what}: {len(alarms.keys() - worse)} of {len(runs) - len(worse)} have a finding. "
            f"{len(worse)} more got worse, {len(alarms.keys() & worse)} of them with a finding."
        )
        for trial, reports in alarms.items():
            print(trial, *(f"{report.kind} at {report.round}: {report.title}" for report in reports), sep="\n    ")
    rows, early, found = [], 0, 0
    for name, run, _ in planned("faults", out, seed):
        if not (run / "done").exists():
            continue
        fault, reports = FAULTS[name], reports_of(run)
        healthy_rounds = fault.begins - 1
        early += any(report.round <= healthy_rounds for report in reports)
        delays: dict[str, int] = {}
        for report in reports:
            delays.setdefault(report.kind, report.round - healthy_rounds)
            print(f"{name}: {report.kind} at {report.round}: {report.title}")
        expected = min((kind for kind in fault.kinds if kind in delays), key=delays.__getitem__, default=None)
        found += expected is not None
        first = f"{expected} | {delays[expected]}" if expected else f"none of {', '.join(fault.kinds)} | missed"
        others = ", ".join(f"{kind} ({delay})" for kind, delay in delays.items() if kind != expected)
        rows.append(f"| {name} | {1 + healthy_rounds} | {first} | {others} |")
    lines += [
        f"- Induced faults: {found} of {len(rows)} are found. {early} have a finding before the fault begins.",
        "",
        "A fault begins in the first round, or in a resume with changed settings after 20 healthy rounds. The delay is "
        "the number of",
        "faulty rounds until the finding is reported.",
        "",
        "| fault | begins in round | finding | delay | other findings (delay) |",
        "|---|---|---|---|---|",
        *rows,
    ]  # fmt: skip
    return lines


def got_worse(run: Path) -> bool:
    """Return whether a run made the model worse: a held-out mean fell by more than two standard errors in all."""
    evaluations = [line["metrics"] for line in read_lines(run) if "eval/held_out" in line["metrics"]]
    return any(
        evaluations[0][name] - evaluations[-1][name]
        > 2 * math.hypot(*(each[f"{name}_stderr"] for each in (evaluations[0], evaluations[-1])))
        for name in ("eval/held_out_accuracy", "eval/held_out_avg_reward")
        if len(evaluations) > 1
    )


def columns_of(run: Path) -> dict[str, Any]:
    """Return the records of a run with one step per round, in columns of three digits, for tests."""
    parts: dict[str, list[dict[str, float]]] = {"rounds": [], "evaluations": []}
    for line in read_lines(run):
        if "rollout_id" in line:
            is_evaluation = any(name.startswith("eval/") for name in line["metrics"])
            parts["evaluations" if is_evaluation else "rounds"].append({"number": line["rollout_id"]} | line["metrics"])
    return {
        part: {
            name: [row.get(name) and float(f"{row[name]:.3g}") for row in rows]
            for name in sorted(set().union(*rows))
            if READ.fullmatch(name)
        }
        for part, rows in parts.items()
    }


def write_page(lines: list[str]) -> None:
    """Write the section of docs/diagnosis.md about the runs."""
    text, begin, end = (
        PAGE.read_text(encoding="utf-8"),
        "<!-- table of benchmarks/diagnosis.py -->\n",
        "<!-- end of table -->",
    )
    before, after = text.partition(begin)[0], text.partition(end)[2]
    PAGE.write_text(before + begin + "\n".join(["", *lines, ""]) + "\n" + end + after, encoding="utf-8")


if __name__ == "__main__":
    main()
