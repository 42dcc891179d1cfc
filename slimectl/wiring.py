"""Settings to parts: the only module that knows adapters by name; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl import cards
from slimectl.errors import CheckpointError, MissingExtraError, SettingsError
from slimectl.hooks import Args, Hook
from slimectl.layouts import ParallelLayout, problems
from slimectl.settings import Settings
from slimectl.settings.algorithm import PolicyGradient, Sft
from slimectl.stages.score import Grader
from slimectl.types import Prompt, Sample

if TYPE_CHECKING:
    from slimectl.engines.embedded.engine import EmbeddedEngine
    from slimectl.executors.local import LocalExecutor
    from slimectl.policies.optimizer import OptimizerOptions
    from slimectl.ports import Agent, Policy, Tracker
    from slimectl.sync.in_process import InProcessSync

AGENT_OFFERS = ("args", "settings", "sample", "sampling_params", "generate", "evaluation")


def model_folder(path: str | None, *, setting: str = "model.path") -> Path:
    """The Hugging Face directory that a setting names. Raises SettingsError or CheckpointError."""
    if path is None:
        raise SettingsError(f"{setting}: no model is given; add --model DIR, a Hugging Face checkpoint directory")
    folder = Path(path)
    if is_gguf(path):
        raise CheckpointError(f"{path}: is a GGUF; convert it first: slimectl convert {path} DIR --to hf")
    if not folder.is_dir():
        raise CheckpointError(f"{path}: no such model directory; give a Hugging Face checkpoint directory")
    if (folder / "policy" / "config.json").exists():
        folder = folder / "policy"  # a checkpoint of a run: runs/NAME/step_000042, or runs/NAME/latest
    if not (folder / "config.json").exists():
        kind = "a torch_dist checkpoint" if (folder / ".metadata").exists() else "not a Hugging Face checkpoint"
        raise CheckpointError(f"{path}: no config.json; this is {kind}")
    return folder


def is_gguf(path: str) -> bool:
    """Whether a model source has to be converted before it can be used."""
    return path.startswith("package:") or path.endswith(".gguf")


def tokenizer(folder: Path) -> Any:
    """The tokenizer of a model directory; transformers' chatter is kept away from the terminal."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {_first_line(error)}") from error


def engine(settings: Settings, folder: Path, text: Any, *, load: bool = True) -> EmbeddedEngine:
    """The engine for a model directory, with its weights unless the first push brings them."""
    import torch
    from transformers import AutoConfig

    from slimectl.checkpoints.hf import HFCheckpoint
    from slimectl.engines.embedded.engine import EmbeddedEngine

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{folder}: config.json cannot be used: {_first_line(error)}") from error
    made = EmbeddedEngine(
        config,
        text,
        dtype=getattr(torch, settings.engine.dtype),
        device=device(settings.engine.device),
        max_running=settings.engine.max_running_requests,
        max_context=settings.rollout.max_context_len,
        end_token_ids=_end_tokens(folder),
    )
    if load:
        made.load_weights(HFCheckpoint().read(folder), version=_version(folder))
    return made


def _version(folder: Path) -> str:
    """The weight version of a checkpoint that training wrote; "0" for a model from elsewhere."""
    import json

    file = folder / "trainer.json"
    return str(json.loads(file.read_text())["step"]) if file.exists() else "0"


def _end_tokens(folder: Path) -> list[int]:
    """The end tokens that generation_config.json adds to those of the config: chat models often have several."""
    import json

    file = folder / "generation_config.json"
    given = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    return [given] if isinstance(given, int) else list(given or [])


def policy(
    settings: Settings, folder: Path, *, total_steps: int | None, lr: float | None = None, trains: bool = True
) -> Policy:
    """The policy for a model directory, over as many ranks as [cluster] says; `lr` given is a constant one."""
    build = partial(_build_policy, settings, folder, total_steps, lr, trains)
    if settings.cluster.ranks == 1:
        return build()
    from slimectl.policies.group import GroupPolicy

    return GroupPolicy(build, ranks=settings.cluster.ranks)


def check_policy(settings: Settings) -> None:
    """Before anything is made: is Megatron-core there, and can the model be laid out so?

    Raises MissingExtraError, SettingsError or CheckpointError.
    """
    if settings.train.policy != "megatron":
        return
    if find_spec("megatron") is None:
        raise MissingExtraError("megatron-core", extra="megatron", wanted_by='train.policy = "megatron"')
    path, card = settings.model.path, settings.model.card
    if path is not None and is_gguf(path):
        return
    from slimectl.weights.complete import completed, read_config
    from slimectl.weights.families import family_of

    config = read_config(model_folder(path)) if path is not None else completed(cards.load(str(card))["config"])
    for problem in problems(
        layout(settings), family_of(config).architecture(config).transformer, settings.cluster.ranks
    ):
        raise SettingsError(problem)


def _build_policy(settings: Settings, folder: Path, total_steps: int | None, lr: float | None, trains: bool) -> Policy:
    """What every rank builds for itself."""
    from slimectl.checkpoints.hf import HFCheckpoint

    train, megatron = settings.train, settings.megatron
    shared: dict[str, Any] = {
        "optimizer": _optimizer(settings, total_steps, lr),
        "temperature": settings.rollout.temperature,
        "max_tokens_per_pack": train.max_tokens_per_gpu,
        "dtype": train.dtype,
        "freeze": train.freeze_params_name_list,
        "train_only": train.only_train_params_name_list,
        "trains": trains,
        "device": device(train.device),
        "seed": settings.run.seed,
    }
    if train.policy == "fsdp":
        from slimectl.policies.fsdp.policy import FsdpPolicy

        return FsdpPolicy(
            folder,
            HFCheckpoint(),
            gradient_checkpointing=train.gradient_checkpointing,
            share_prompts=train.share_prompts,
            **shared,
        )
    from slimectl.policies.megatron.config import Recompute
    from slimectl.policies.megatron.policy import MegatronPolicy

    granularity = "full" if train.gradient_checkpointing else megatron.recompute_granularity or "none"
    return MegatronPolicy(
        folder,
        HFCheckpoint(),
        layout=layout(settings),
        recompute=Recompute(granularity, tuple(megatron.recompute_modules)),
        distributed_optimizer=megatron.use_distributed_optimizer,
        optimizer_cpu_offload=megatron.optimizer_cpu_offload,
        routing_replay=megatron.use_routing_replay,
        args=megatron.args,
        **shared,
    )


def _optimizer(settings: Settings, total_steps: int | None, lr: float | None) -> OptimizerOptions:
    """The optimizer of [train]; `lr` given is a constant one."""
    from slimectl.policies.optimizer import OptimizerOptions

    train = settings.train
    return OptimizerOptions(
        lr=train.lr if lr is None else lr,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
        clip_grad=train.clip_grad,
        schedule=train.lr_decay_style if lr is None else "constant",
        warmup_steps=train.lr_warmup_iters if lr is None else 0,
        decay_steps=train.lr_decay_iters or total_steps,
        min_lr=train.min_lr if lr is None else 0.0,
    )


def layout(settings: Settings) -> ParallelLayout:
    """How [megatron] lays a model over ranks."""
    megatron = settings.megatron
    return ParallelLayout(
        tensor=megatron.tensor_model_parallel_size,
        pipeline=megatron.pipeline_model_parallel_size,
        virtual_pipeline=megatron.virtual_pipeline_model_parallel_size,
        context=megatron.context_parallel_size,
        expert=megatron.expert_model_parallel_size,
        expert_tensor=megatron.expert_tensor_parallel_size,
    )


def sync(policy: Policy, engine: Any) -> InProcessSync:
    from slimectl.sync.in_process import InProcessSync

    return InProcessSync(policy, engine)


def new_model(card: str, into: Path, *, seed: int) -> None:
    """Random weights for a model card, with config and tokenizer, into the folder `into`."""
    from slimectl.checkpoints.create import create_model

    facts = cards.load(card)
    create_model(facts["config"], into, seed=seed, tokenizer=facts.get("tokenizer", "byte"))


def convert(source: str, target: Path, **options: Any) -> dict[str, Any]:
    """Any readable model source to a Hugging Face directory at `target`."""
    from slimectl.conversions import convert_checkpoint

    return convert_checkpoint(source, target, **options)


def source_of(source: str) -> Path:
    """The directory or file that a model source names."""
    from slimectl.checkpoints.locate import resolve_source

    return resolve_source(source)


def frozen(settings: Settings, folder: Path) -> Policy:
    """A model that is only asked for log-probabilities."""
    return policy(settings, folder, total_steps=None, lr=0.0, trains=False)


def reference(settings: Settings, start: Path) -> Policy | None:
    """The frozen reference, where a divergence is measured: algorithm.ref_load, else the model at `start`."""
    algorithm = settings.algorithm
    if not isinstance(algorithm, PolicyGradient) or (algorithm.kl_loss_coef == 0 and algorithm.kl_coef == 0):
        return None
    path = algorithm.ref_load
    return frozen(settings, model_folder(path, setting="algorithm.ref_load") if path else start)


def prompts(
    settings: Settings, sources: list[str], *, epochs: int | None = 1, start: int = 0, shuffle: bool = True
) -> Iterator[Prompt]:
    """The prompts of `sources` from occurrence `start` on, `epochs` times over (None: without end)."""
    from slimectl.data.prompts import open_prompts

    if not sources:
        raise SettingsError("rollout.data: no prompts are given; add --data FILE")
    given = settings.rollout
    return open_prompts(
        sources,
        input_key=given.input_key,
        label_key=given.label_key,
        metadata_key=given.metadata_key,
        tool_key=given.tool_key,
        shuffle_seed=given.seed if given.shuffle and shuffle else None,
        epochs=epochs,
        start=start,
    )


def training_samples(
    settings: Settings, path: str, text: Any, *, on_error: str, report: Callable[[str], None]
) -> Iterator[Sample]:
    """The samples to train on; for sft also plain demonstrations: prompts with a label, or chats with answers."""
    from slimectl.data.jsonl import read_samples

    if isinstance(settings.algorithm, Sft) and path != "-" and not _has_tokens(Path(path)):
        from slimectl.stages.rollout import demonstrations

        return demonstrations(prompts(settings, [path]), text, settings.rollout)
    return read_samples(path, on_error=on_error, report=report)


def _has_tokens(path: Path) -> bool:
    """Whether the first line is a sample rather than a prompt."""
    from slimectl.data.jsonl import read_lines

    return any("tokens" in line for _, line in islice(read_lines(path), 1))


def total_steps(settings: Settings) -> int | None:
    """Optimizer steps of a whole run, where its length is known."""
    rounds = settings.run.num_rollout
    return None if rounds is None else rounds * settings.steps_per_round


def reward(settings: Settings) -> Grader:
    return Grader(settings)


def agent(settings: Settings) -> Agent | None:
    """The user's own generate function, with the settings among what it is offered."""
    path = settings.rollout.custom_generate_function_path
    if path is None:
        return None
    hook = Hook(path, setting="rollout.custom_generate_function_path", offers=AGENT_OFFERS)
    args = Args(settings)
    # Bare: an attempt that raises is a failed sample, whether the function is async or not.
    return lambda offered: hook.bare({**offered, "args": args, "settings": args})


def executor() -> LocalExecutor:
    from slimectl.executors.local import LocalExecutor

    return LocalExecutor()


def trackers(settings: Settings, folder: Path, *, resumed_at: int | None = None, done: int = 0) -> list[Tracker]:
    """The trackers of [track]; the run's own metrics.jsonl is written besides."""
    makers: dict[str, Callable[[dict[str, Any]], Tracker]] = {
        "stdout": partial(_stdout, settings.run.num_rollout, done),
        "jsonl": partial(_jsonl, folder),
        "tensorboard": partial(_tensorboard, folder, resumed_at, settings.track.always_use_train_step),
    }
    return [makers[name](settings.track.kwargs.get(name, {})) for name in settings.track.with_]


def _stdout(total: int | None, done: int, kwargs: dict[str, Any]) -> Tracker:
    """A live bar on a terminal, a plain line a step elsewhere."""
    import sys

    if sys.stderr.isatty():
        from slimectl.trackers.progress import ProgressTracker

        return ProgressTracker(total=total, done=done)
    from slimectl.trackers.stdout import StdoutTracker

    return StdoutTracker(**kwargs)


def _jsonl(folder: Path, kwargs: dict[str, Any]) -> Tracker:
    """What every tracker gets, metrics and times in one line; metrics.jsonl has only what the seed decides."""
    from slimectl.trackers.jsonl import JsonlTracker

    return JsonlTracker(Path(kwargs.get("path", folder / "tracked.jsonl")))


def _tensorboard(folder: Path, resumed_at: int | None, one_axis: bool, kwargs: dict[str, Any]) -> Tracker:
    from slimectl.trackers.tensorboard import TensorboardTracker

    return TensorboardTracker(folder / "tensorboard", one_axis=one_axis, purge_step=resumed_at, **kwargs)


def device(wanted: str) -> str:
    """`auto` is the GPU if there is one. Raises SettingsError if cuda is asked for and absent."""
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device: cuda is asked for, but torch sees no GPU; use auto or cpu")
    return wanted


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
