"""Builds the inputs of the stages: prompts, samples, rewards, agents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.chats.model_tokens import vocabulary_size
from slimectl.data.io import is_pipe, spool
from slimectl.data.jsonl import read_samples
from slimectl.errors import RecordError, SettingsError
from slimectl.hooks import FlatSettings, hook
from slimectl.runtime.builders.models import model_folder, reads_images
from slimectl.settings import Settings
from slimectl.stages.score import Grader
from slimectl.types import Prompt, Sample, SamplerState

ROWS_WITH_IMAGES = 10_000
"""Rows of a source that are searched for images before servers start."""

if TYPE_CHECKING:
    from slimectl.agents.environments.episode import Specification
    from slimectl.data.columns import PromptOptions
    from slimectl.data.difficulty_pools import DifficultyPools
    from slimectl.data.tables import Table
    from slimectl.protocols import Agent, Engine
    from slimectl.settings.evaluate import EvalSettings
    from slimectl.settings.needs import AlgorithmSection
    from slimectl.settings.rollout import RolloutSettings
    from slimectl.stages.evaluate import HeldOutDataset
    from slimectl.stages.generation import GroupGenerator
    from slimectl.stages.recorded_rounds import Numbered, SampleFiles


def prompts(
    settings: Settings,
    sources: list[str],
    *,
    epochs: int | None = 1,
    start: int = 0,
    shuffle: bool = True,
    demonstrations: bool = False,
) -> Iterator[Prompt]:
    """Yield the prompts of `sources` from occurrence `start` on, for `epochs` epochs (None: without end).

    Chats of `demonstrations` keep the responses to imitate.
    """
    from slimectl.data.prompts import open_prompts

    if not sources:
        raise SettingsError("rollout.data: no prompts are given. Add --data FILE.")
    options = prompt_options(settings, sources, epochs=epochs, start=start, demonstrations=demonstrations)
    return open_prompts(sources, options if shuffle else replace(options, shuffle_seed=None))


def pooled_prompts(
    settings: Settings, state: SamplerState, *, epochs: int | None
) -> tuple[Iterator[Prompt], DifficultyPools]:
    """Return the prompts of rollout.data that difficulty pools draw after `state`, and these pools."""
    from slimectl.data.difficulty_pools import DifficultyPools, PoolOptions
    from slimectl.data.prompts import pooled_prompts

    rollout = settings.rollout
    keys = ("easy_threshold", "hard_threshold", "easy_fraction", "hard_fraction", "retire_after", "seed")
    options = PoolOptions(**{key: getattr(rollout, key) for key in keys})
    pools = DifficultyPools(options, state.source, position=state.position)
    reading = prompt_options(settings, list(rollout.data), epochs=epochs, start=state.position)
    return pooled_prompts(list(rollout.data), reading, pools), pools


def prompt_options(settings: Settings, sources: Sequence[str], **reading: Any) -> PromptOptions:
    """Return how the settings read the rows of `sources`. `reading` has further options."""
    from slimectl.data.columns import PromptOptions

    rollout, trains = settings.rollout, list(sources) == list(settings.rollout.data)
    return PromptOptions(
        **{key: getattr(rollout, key) for key in ("input_key", "label_key", "metadata_key", "tool_key", "image_key")},
        reads_images=reads_images(settings.model),
        shuffle_seed=rollout.seed if rollout.shuffle else None,
        weights=rollout.data_weights if trains else None,
        domain_weights=rollout.domain_weights if trains else {},
        domain_key=rollout.domain_key,
        mix_seed=rollout.seed,
        named=EnvironmentTables(rollout),
        **reading,
    )


def shard_prompts(settings: Settings, *, epochs: int) -> Iterator[Prompt]:
    """Yield the prompts of rollout.data. A slice of a file keeps the indices, and so the seeds, of the whole file."""
    from slimectl.data.sources import first_row

    sources = list(settings.rollout.data)
    in_order = len(sources) == 1 and epochs == 1 and not settings.rollout.shuffle
    first = first_row(sources[0]) if in_order else 0
    return (replace(prompt, index=prompt.index + first) for prompt in prompts(settings, sources, epochs=epochs))


def check_images(settings: Settings, sources: Iterable[str], *, servers: bool) -> None:
    """Raise RecordError if `servers` would sample a prompt with images. Called before any server is started.

    Checks the first ROWS_WITH_IMAGES rows of each source, and only for a model that reads images.
    """
    if servers and reads_images(settings.model):
        for source in sources:
            rows = () if is_pipe(source) else prompts(settings, [source], shuffle=False)
            for prompt in islice(rows, ROWS_WITH_IMAGES):
                if prompt.images:
                    raise RecordError(
                        f"{prompt.source_location}: images: engine servers do not read images. Use one embedded engine "
                        f'(engine.backend = "embedded", engine.num_engines = 1, cluster.executor = "local"), or drop '
                        "the row."
                    )


class EnvironmentTables:
    """Opens the sources `env` and `env:eval`, the tasks of rollout.env."""

    def __init__(self, rollout: RolloutSettings) -> None:
        self._rollout = rollout

    def open(self, source: str, *, unbounded: bool) -> Table | None:
        """Return the tasks of a split, or None for another source. Raises SettingsError without rollout.env."""
        name, _, split = source.partition(":")
        if name != "env" or split not in ("", "train", "eval"):
            return None
        if self._rollout.env is None:
            if Path(source).exists():
                return None
            raise SettingsError(
                f"{source}: this source is the tasks of rollout.env, which is not set. Add --env KIND:ID."
            )
        from slimectl.agents.environments.tasks import task_table

        return task_table(environment(self._rollout), split or "train", unbounded=unbounded)


def data_identities(evaluation: EvalSettings, sources: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the identities of the `sources` of rollout.data and of each dataset of [eval], by setting."""
    from slimectl.data.source_identity import source_identity

    evaluations = {f"eval.data.{name}": [source] for name, source in evaluation.sources.items()}
    return {key: list(map(source_identity, names)) for key, names in {"rollout.data": sources, **evaluations}.items()}


def environment(rollout: RolloutSettings) -> Specification:
    """Return the specification of rollout.env."""
    from slimectl.agents.environments.agent import specification_of

    return specification_of(str(rollout.env), rollout.env_args, rollout.env_python)


def check_pipes(settings: Settings) -> None:
    """Raise SettingsError for a pipe that a run would read more than once."""
    warm_up = [*settings.sft_warmup.data, *settings.rollout.data] if settings.sft_warmup.data else []
    for source in filter(is_pipe, [*settings.eval.sources.values(), *warm_up]):
        raise SettingsError(
            f"{source}: is a pipe, but evaluations and the warm-up read it again. Write it to a file first."
        )


def training_samples(
    settings: Settings,
    files: SampleFiles,
    tokenizer: Any,
    *,
    context: int | None = None,
    on_skipped: Callable[[Prompt], Any] = lambda prompt: None,
    epochs: int | None = 1,
    start: int = 0,
) -> Iterator[Numbered]:
    """Yield the samples to train on, each with the occurrence of its row.

    Algorithm sft also accepts plain demonstrations: prompts with a label, or chats with responses. Pairwise algorithms
    also accept plain preferences: rows with the responses `chosen` and `rejected`. `on_skipped` is called for
    demonstrations and preferences longer than `context`. The files are read end to end, `epochs` times (None: without
    end), from occurrence `start` on.
    """
    from slimectl.data.preferences import open_preferences
    from slimectl.data.prompts import open_prompts
    from slimectl.stages.preferences import preferred
    from slimectl.stages.recorded_rounds import repeated
    from slimectl.stages.rollout import demonstrations

    paths, bad = files.paths, files.on_bad_line
    if not has_plain_rows(settings.algorithm, paths):
        size = None if tokenizer is None else vocabulary_size(Path(tokenizer.name_or_path))
        read = partial(
            read_samples,
            paths,
            on_error="stop" if bad is None else "skip",
            report=bad,
            on_line=files.on_line,
            vocabulary=size,
        )
        return repeated(read, epochs=epochs, start=start)
    options = prompt_options(settings, paths, epochs=epochs, start=start, demonstrations=True)
    limits: dict[str, Any] = {"context": context, "on_skipped": on_skipped, "on_bad_row": bad}
    if settings.algorithm.trains_on == "preferences":
        pairs = open_preferences(paths, replace(options, label_key="label", weights=None), on_bad_row=bad)
        samples = preferred(pairs, tokenizer, settings.rollout, **limits)
    else:
        samples = demonstrations(open_prompts(paths, options, on_bad_row=bad), tokenizer, settings.rollout, **limits)
    return _by_row(samples, files.on_line)


def _by_row(samples: Iterator[Sample], on_line: Callable[[str], None]) -> Iterator[Numbered]:
    """Yield samples of plain rows with the occurrence of their row, which is also their group index."""
    for occurrence, row in groupby(samples, key=lambda sample: sample.group_index):
        on_line(f"row {occurrence}")
        yield from ((occurrence, sample) for sample in row)


def has_plain_rows(algorithm: AlgorithmSection, paths: Sequence[str]) -> bool:
    """Return whether files contain demonstrations or preferences instead of samples.

    Raises RecordError if this holds only for some of the files.
    """
    if algorithm.trains_on == "rollouts" or "-" in paths:
        return False
    sampled = [path for path in paths if _has_tokens(path)]
    if 0 < len(sampled) < len(paths):
        plain = next(path for path in paths if path not in sampled)
        raise RecordError(
            f"{plain}: has rows without tokens, but {sampled[0]} has samples. Train on one kind of file at a time."
        )
    return not sampled


def _has_tokens(path: str) -> bool:
    """Return whether the first row is a sample rather than a prompt."""
    from slimectl.data.prompts import ordered_rows

    spool(path)  # it is read again from the start
    return any(isinstance(row, dict) and "tokens" in row for _, row in islice(ordered_rows([path]), 1))


def reward(settings: Settings, function: Callable[..., Any] | None = None) -> Grader:
    """Build the grader of samples, and check the folder of a reward model.

    A user's `function` may have any form that score.custom_rm_path accepts. It replaces the rewards of the settings.
    Raises SettingsError or CheckpointError, and HookError if the function has a wrong signature.
    """
    path = settings.score.rm_options.get("path") if settings.score.rm_type == "reward_model" else None
    if isinstance(path, str) and (Path(path) / "config.json").exists():
        model_folder(path, setting="score.rm_options.path", verify=settings.model.verify)
    from slimectl.hooks.reward import UserReward

    return Grader(settings, UserReward, function)


def agent(settings: Settings) -> Agent | None:
    """Return the agent from rollout.env, rollout.agent or the user's function, or None without one."""
    rollout, limits = settings.rollout, ("timeout_s", "max_turns", "retries", "concurrency")
    # The agent's own reward is used if no verifier is set.
    options: dict[str, Any] = {"gives_reward": not settings.names_verifier, "template_kwargs": rollout.template_kwargs}
    if rollout.env:
        from slimectl.agents.environments.agent import EnvironmentAgent, EnvironmentOptions
        from slimectl.stages.generation import single_turn

        options |= {name: getattr(rollout, f"env_{name}") for name in (*limits, "turn_tokens")}
        return EnvironmentAgent(EnvironmentOptions(environment(rollout), **options), single_turn)
    if rollout.agent:
        from slimectl.agents.command import CommandAgent, CommandOptions

        options |= {name: getattr(rollout, f"agent_{name}") for name in (*limits, "model")}
        return CommandAgent(CommandOptions(rollout.agent, **options))
    user_fn, args = hook(settings, "rollout.custom_generate_function_path"), FlatSettings(settings)
    if user_fn is None:
        return None

    from slimectl.hooks.rollout import as_agent

    return as_agent(user_fn, args)


def hook_settings(settings: Settings, engine: Any, folder: Path | None = None) -> Settings:
    """Return the settings for hooks, in which engine.url has the addresses of the servers that were started.

    The list is the engine's own object, so it stays correct when servers restart. If `folder` is given, model.path is
    set to it, because a run may have created the model itself.
    """
    changes: dict[str, Any] = {}
    if addresses := getattr(engine, "addresses", None):
        changes["engine"] = settings.engine.model_copy(update={"url": addresses})
    if folder is not None:
        changes["model"] = settings.model.model_copy(update={"path": str(folder)})
    return settings.model_copy(update=changes)


def data_source(settings: Settings) -> Any:
    """Build the user's source of groups, or None if prompts come from rollout.data."""
    from slimectl.data.prompt_dataset import PromptDataset

    user_fn, args = hook(settings, "rollout.data_source_path"), FlatSettings(settings)
    if user_fn is None:
        return None
    rows = partial(prompts, settings, list(settings.rollout.data), shuffle=False)
    return user_fn({"args": args, "settings": args, "dataset": PromptDataset(rows, settings.rollout.seed)})


def generator(settings: Settings, engine: Engine, tokenizer: Any) -> GroupGenerator:
    """Build the generator of groups with the user's agent and functions."""
    from slimectl.hooks.user_hooks import UserHooks
    from slimectl.stages.generation import GroupGenerator, single_turn

    return GroupGenerator(engine, tokenizer, settings.rollout, agent(settings) or single_turn, UserHooks(settings))


def dataset(settings: Settings, name: str) -> HeldOutDataset:
    """Build a dataset of [eval] with its own verifier and agent."""
    from slimectl.hooks.user_hooks import UserHooks
    from slimectl.stages.evaluate import HeldOutDataset, resolve_dataset_settings
    from slimectl.stages.generation import single_turn

    own = resolve_dataset_settings(settings, name)
    return HeldOutDataset(name, own, reward(own), agent(own) or single_turn, UserHooks(own))
