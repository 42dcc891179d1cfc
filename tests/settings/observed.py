"""Small parts of slimectl at work under given settings, each seen as lines of text that can be compared."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from slimectl.cli.run import closing_words
from slimectl.data.records import sample_to_json
from slimectl.errors import SlimectlError
from slimectl.recipes import Recipe
from slimectl.runtime import builders
from slimectl.runtime.model_functions import Sampler, Trainer
from slimectl.runtime.run import TrainingRun
from slimectl.runtime.stage_functions import evaluate, load_settings, prompts, score
from slimectl.settings import Settings
from slimectl.stages.evaluate import resolve_dataset_settings
from slimectl.system.stdio import logger
from slimectl.types import Sample, Status, TrainingSample

Values = Mapping[str, Any]
Lines = list[str]
REWARDS = ((1.0, 0.0, 0.25), (1.0, 1.0, 0.0), (0.5, 0.5, 0.5), (0.5, 0.0, 1.0))
"""Rewards of four groups of three answers; those of the third are equal."""


def attempts(rewards: Sequence[Sequence[float]] = REWARDS) -> list[Sample]:
    """Graded answers with every column that an algorithm can ask for; engine and trainer disagree about them."""
    draw = random.Random(1)
    samples = []
    for group, group_rewards in enumerate(rewards):
        prompt = [draw.randrange(256) for _ in range(6)]
        for i, reward in enumerate(group_rewards):
            length = 3 + i + group
            tokens = prompt + [draw.randrange(256) for _ in range(length)]
            columns = [[low + draw.random() * (-4 - low) for _ in range(length)] for low in (-8.0, -6.0, -7.0)]
            sample = Sample(group, 3 * group + i, tokens=tokens, response_length=length, status=Status.COMPLETED)
            sample.reward = {"score": reward, "other": 1 - reward}
            sample.rollout_log_probs, sample.ref_log_probs, sample.teacher_log_probs = columns
            sample.weight_versions = ["0"]
            sample.turn_rewards = [
                {"reward": 0.1 * group, "start": 0, "end": 2, "turn": 0, "state": "start"},
                {"reward": reward, "start": 2, "end": length, "turn": 1, "state": "end" if i else "start"},
            ]
            sample.metadata = {"kind": "even" if i % 2 else "odd"}
            samples.append(sample)
    return samples


class Workplace:
    """Models and files that settings may name, and the observations; an observation is made once."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self._seen: dict[str, Lines] = {}

    def observe(self, probe: Callable[[Workplace, Settings], Lines], values: Values) -> Lines:
        """What `probe` sees under these settings; a refusal is one line, "refused: …"."""
        known = f"{probe.__name__} {json.dumps(values, sort_keys=True, default=str)}"
        if known not in self._seen:
            try:
                self._seen[known] = probe(self, load_settings(None, {"model.path": str(self.model)} | dict(values)))
            except SlimectlError as error:
                self._seen[known] = [f"refused: {error}"]
        return self._seen[known]


def named(numbers: Mapping[str, Any]) -> Lines:
    return [f"{name} = {value}" for name, value in numbers.items()]


def fingerprint(weights: Iterator[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in weights:
        digest.update(name.encode() + tensor.detach().float().contiguous().numpy().tobytes())
    return f"weights = {digest.hexdigest()[:16]}"


def trained(place: Workplace, settings: Settings) -> Lines:
    """Metrics of every step over the answers, and the weights in the end."""
    with Trainer(settings) as trainer:
        lines = [line for report in trainer.train(attempts()) for line in named(report.metrics)]
        return [*lines, fingerprint(trainer.policy.weights())]


def distilled(place: Workplace, settings: Settings) -> Lines:
    """As `trained`, of answers that bring no log-probabilities of other models."""
    samples = attempts()
    for sample in samples:
        sample.ref_log_probs = sample.teacher_log_probs = None
    with Trainer(settings) as trainer:
        return [line for report in trainer.train(samples) for line in named(report.metrics)]


def referred(place: Workplace, settings: Settings) -> Lines:
    """Log-probabilities of the reference."""
    reference = builders.reference(settings, place.model)
    assert reference is not None
    return [str(reference.log_probs([TrainingSample(tokens=[1, 2, 3], response_length=2, loss_weights=[1.0, 1.0])]))]


def stale(place: Workplace, settings: Settings) -> Lines:
    """Metrics of training twice on the answers: the second time they are some versions old."""
    with Trainer(settings) as trainer:
        for _ in trainer.train(attempts()):
            pass
        return [line for report in trainer.train(attempts()) for line in named(report.metrics)]


def sampled(place: Workplace, settings: Settings) -> Lines:
    """The samples of rollout.data."""
    with Sampler(settings) as sampler:
        return [json.dumps(sample_to_json(sample), default=str) for sample in sampler.rollout(prompts(settings))]


def read(place: Workplace, settings: Settings) -> Lines:
    """The prompts of rollout.data."""
    return [repr(prompt) for prompt in prompts(settings)]


def graded(place: Workplace, settings: Settings) -> Lines:
    """Rewards, and what else grading writes into a sample."""
    samples = [
        Sample(i // 2, i, prompt="p", response=text, label="4", metadata={"kind": "x"}, status=Status.COMPLETED)
        for i, text in enumerate((r"\boxed{4}", "four", "Answer: 4", "5"))
    ]
    samples[3].metadata["rm_type"] = "exact"
    return [json.dumps(sample_to_json(sample)) for sample in score(samples, settings)]


def graded_by_name(place: Workplace, settings: Settings) -> Lines:
    """Grading of a sample that names its own function."""
    sample = Sample(0, 0, prompt="p", response="4", custom_rm_path=f"{place.folder}/own.py:always")
    return [json.dumps(sample_to_json(graded)) for graded in score([sample], settings)]


def evaluated(place: Workplace, settings: Settings) -> Lines:
    """Metrics of the datasets of [eval]."""
    return named(evaluate(settings))


def questions(place: Workplace, settings: Settings) -> Lines:
    """The prompts of the dataset `small`."""
    own = resolve_dataset_settings(settings, "small")
    return [repr(prompt) for prompt in builders.prompts(own, [settings.eval.sources["small"]])]


def placed(place: Workplace, settings: Settings) -> Lines:
    """The process and GPU of every rank and engine."""
    from slimectl.runtime.builders.executors import placement

    return [repr(bundle) for bundle in placement(settings).bundles]


def launched(place: Workplace, settings: Settings) -> Lines:
    """The job of a run on GPUs, for Slurm, Kubernetes and SkyPilot."""
    from slimectl.launchers import manifests, shell
    from slimectl.launchers.job import job_of
    from slimectl.planner.placement import Placement

    complete = {"image": "image", "claim": "claim", "gpu_type": "H100"}
    own = settings.launch.model_copy(update={k: v for k, v in complete.items() if getattr(settings.launch, k) is None})
    settings = settings.model_copy(update={"launch": own})
    job = job_of(settings, ("quickstart",), place.folder, Placement(actor_gpus_per_node=8))
    text = shell.slurm_script(job) + manifests.ray_job_manifest(job) + manifests.sky_task(job)
    return text.splitlines()


def served(place: Workplace, settings: Settings) -> Lines:
    """Servers that would be started: specifications, command lines, environments, who watches them, their router."""
    from slimectl.executors.local import LocalExecutor
    from slimectl.runtime.builders import servers
    from slimectl.runtime.builders.engines import engine_backend

    specs, policy = engine_backend(settings).specs(settings, place.model), servers._router_policy(settings)
    lines = [settings.engine.backend, f"router = {policy}", *(repr(spec) for spec in specs)]
    if settings.engine.backend not in ("auto", "embedded") or policy is not None:
        return lines  # their programs are installed in few places
    for spec in specs:
        process = servers._server(settings, spec, log=place.folder / "log", waiting=True)
        program, options = process.program, process.options
        lines += [*program.command("127.0.0.1", 1), repr(sorted(program.env)), repr(options.start_timeout_s)]
    pool = servers.new_pool(settings, place.model, executor=LocalExecutor(), folder=place.folder, waiting=True)
    return [*lines, repr(pool.watch)]


def installed(place: Workplace, settings: Settings) -> Lines:
    """The Python that the servers of an installed engine would run in."""
    from slimectl.engines.supervisor.server_process import ServerProcess
    from slimectl.runtime.builders.engines import engine_backend

    backend: Any = engine_backend(settings)
    spec = backend.specs(settings, place.model)[0]
    server: ServerProcess = backend.server(settings, spec, log=place.folder / "log", waiting=True)
    return list(server.program.command("127.0.0.1", 1))


def asked(place: Workplace, settings: Settings) -> Lines:
    """The client of servers: addresses, limits, keys of its requests."""
    from slimectl.runtime.builders import servers

    found = servers.client(settings, place.model, builders.tokenizer(place.model), ["http://a:1"], ["http://a:1"])
    lines = [f"{found.addresses} {found.max_context}", repr(found.options)]
    keys = servers.keys(settings)
    return [*lines, f"api_key = {keys.api_key}", f"admin_api_key = {keys.admin_api_key}"]


class Receiver:
    """The engines' side of a push, which keeps what it gets."""

    urls, ranks, shares_memory, checksums_by_hf_name = ("http://127.0.0.1:1",), (1,), True, True
    adapter_transports = ("tensor", "distributed")

    def __init__(self) -> None:
        self.lines: Lines = []

    def begin(self, *, mode: str) -> None:
        self.lines.append(f"begin {mode}")

    def end(self, *, within_s: float | None = None) -> None:
        self.lines.append("end")

    def load_disk(self, folder: Path, *, version: str, delta: Path | None = None) -> None:
        self.lines.append(f"load {folder} {version}")

    def expect_adapter(self, adapter: Any) -> None:
        self.lines.append(f"expect {len(adapter.layers)} layers of rank {adapter.rank}")

    def message_memory(self, most_bytes: int) -> AbstractContextManager[None]:
        return nullcontext()

    def release_memory(self) -> None: ...

    def load_tensors(self, tensors: Sequence[tuple[str, torch.Tensor]], *, version: str) -> None:
        self.lines.append(f"load {len(tensors)} tensors of {tensors[0][1].dtype}")

    def randomize_weights(self) -> None:
        self.lines.append("randomize")

    def checksums(self) -> list[dict[str, str]]:
        self.lines.append("checksums")
        return [{}]


def pushed(place: Workplace, settings: Settings) -> Lines:
    """What engines get of two pushes, and the files that are left."""
    from slimectl.runtime.builders.weight_sync import to_servers

    folder = place.folder / hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
    receiver: Any = Receiver()
    with Trainer(settings) as trainer:
        sync: Any = to_servers(settings, trainer.policy, receiver, model=place.model, folder=folder)
        lines = [
            type(sync).__name__,
            *(f"{name} = {getattr(sync, name, None)}" for name in ("pause_mode", "checksum", "buffer_bytes")),
        ]
        try:
            for _ in trainer.train(attempts()):
                sync.push()
        except SlimectlError as error:
            receiver.lines.append(str(error))
        files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        sizes = [f"{path.name} = {path.stat().st_size}" for path in sorted(folder.rglob("*.delta"))]
        sync.close()
    left = [str(path) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [line.replace(str(folder), "FOLDER") for line in [*lines, *receiver.lines, *files, *sizes, *left]]


def on_megatron(place: Workplace, settings: Settings) -> Lines:
    """A step on Megatron-core: metrics, weights, and its configuration in the layout of [megatron]."""
    from slimectl.architectures.config import read_config
    from slimectl.architectures.registry import family_of
    from slimectl.policies.megatron.config import transformer_config
    from slimectl.runtime.builders.trainers import layout

    config = read_config(Path(str(settings.model.path)))
    sizes = transformer_config(family_of(config).architecture(config), layout(settings.megatron), dtype=torch.float32)
    lines = [line for line in str(sizes).split(", ") if "_parallel_size=" in line]
    if settings.cluster.ranks > 1:
        return lines
    with Trainer(settings) as trainer:
        policy: Any = trainer.policy
        lines += [line for report in trainer.train(attempts()) for line in named(report.metrics)]
        chunk = policy.chunks[0]
        recompute = [
            f"{name} = {getattr(chunk.config, name)}" for name in ("recompute_granularity", "recompute_modules")
        ]
        optimizer = [type(part).__name__ for part in policy.optimizer.chained_optimizers]
        return [*lines, *recompute, *optimizer, f"{vars(policy).keys()}", fingerprint(policy.weights())]


def tracked(place: Workplace, settings: Settings) -> Lines:
    """The run as services know it, its folder for curves, and where they stand."""
    from slimectl.runtime.builders.trackers import identity, start_trackers, tracked_run

    folder = place.folder / hashlib.sha256(repr(settings.track).encode()).hexdigest()[:12]
    folder.mkdir(exist_ok=True)
    (folder / "track.json").write_text('{"run_id": "abcdefgh"}')
    known = vars(identity(settings, folder)) | {"log_dir": tracked_run(settings, folder).log_dir}
    lines = [f"{name} = {value}" for name, value in known.items() if name != "config"]
    if "wandb" in settings.track.with_:
        return lines  # tests/trackers/test_services.py reads what it writes
    for tracker in start_trackers(settings, folder):
        tracker.log({"rollout/raw_reward": 0.5, "rollout/step": 1.0}, step=4)
        tracker.close()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        lines += [file.name.partition(".")[0], *(file.read_text().splitlines() if file.suffix == ".jsonl" else [])]
        lines += curve(file) if "tfevents" in file.name else []
    return lines


def curve(file: Path) -> Lines:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return [
        f"{value.tag} at {event.step}" for event in EventFileLoader(str(file)).Load() for value in event.summary.value
    ]


class Words(logging.Handler):
    """Collects the messages of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Lines = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"says {record.getMessage()}")


@contextmanager
def listening() -> Iterator[Words]:
    words = Words()
    logger.addHandler(words)
    try:
        yield words
    finally:
        logger.removeHandler(words)


def ran(place: Workplace, settings: Settings) -> Lines:
    """A run: its files, metrics, messages and the points of its curves."""
    top = place.folder / hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
    own = {"dir": str(top / settings.run.dir)}
    settings = settings.model_copy(update={"run": settings.run.model_copy(update=own)})
    with listening() as words:
        try:
            job = TrainingRun(settings)
            job.execute()
        except SlimectlError as error:
            words.lines.append(f"ends with {error}")
            job = None
    lines = [f"file {path.relative_to(top)}" for path in sorted(top.rglob("*")) if path.is_file()]
    lines = [line.replace(line.rpartition("tfevents.")[2], "") if "tfevents." in line else line for line in lines]
    for file in sorted(top.rglob("metrics.jsonl")) + sorted(top.rglob("tracked.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            lines += [f"step {row['step']} {line}" for line in named(row["metrics"]) if not TIMED.search(line)]
            lines += [f"table {row['table']} {len(row['rows'])}"] if "table" in row else []
    if job is not None and (checkpoint := top / job.folder.path.relative_to(top) / "latest").exists():
        digest = hashlib.sha256((checkpoint.resolve() / "policy" / "model.safetensors").read_bytes()).hexdigest()
        lines.append(f"weights = {digest[:16]}")
    lines += closing(job) if job is not None else []
    return lines + [line.replace(str(top), "TOP") for line in words.lines if not TIMED.search(line)]


TIMED = re.compile(r"perf/|time|per_s|tokens_per")
"""Lines that depend on the clock."""


def closing(job: TrainingRun) -> Lines:
    """Words at the end of a run."""
    said = StringIO()
    with redirect_stderr(said):
        closing_words(job, Recipe(None, {}))
    return [f"closes {line}" for line in said.getvalue().splitlines()]
