"""Builds the inputs of the stages: prompts, samples, rewards, agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slimectl.builders.models import model_folder
from slimectl.errors import RecordError, SettingsError
from slimectl.hooks import FlatSettings, hook
from slimectl.settings import Settings
from slimectl.stages.score import Grader
from slimectl.types import Prompt, Sample

if TYPE_CHECKING:
    from slimectl.protocols import Agent, Engine


def prompts(
    settings: Settings, sources: list[str], *, epochs: int | None = 1, start: int = 0, shuffle: bool = True
) -> Iterator[Prompt]:
    """Yield the prompts of `sources` from occurrence `start` on, for `epochs` epochs (None: without end)."""
    from slimectl.data.prompts import open_prompts

    if not sources:
        raise SettingsError("rollout.data: no prompts are given; add --data FILE")
    options = settings.rollout
    return open_prompts(
        sources,
        input_key=options.input_key,
        label_key=options.label_key,
        metadata_key=options.metadata_key,
        tool_key=options.tool_key,
        shuffle_seed=options.seed if options.shuffle and shuffle else None,
        weights=options.data_weights if sources == list(options.data) else None,
        mix_seed=options.seed,
        epochs=epochs,
        start=start,
    )


def check_pipes(settings: Settings) -> None:
    """Raise SettingsError for a pipe that a run would read more than once."""
    from slimectl.data.io import is_pipe

    warm_up = [*settings.sft_warmup.data, *settings.rollout.data] if settings.sft_warmup.data else []
    for source in filter(is_pipe, [*settings.eval.sources.values(), *warm_up]):
        raise SettingsError(
            f"{source}: is a pipe, and evaluations and the warm-up read it again; write it to a file first"
        )


def training_samples(
    settings: Settings,
    path: str,
    text: Any,
    *,
    on_error: Literal["stop", "skip"],
    report: Callable[[RecordError], None],
    on_line: Callable[[str], None] = lambda location: None,
    context: int | None = None,
    left_out: Callable[[Prompt], Any] = lambda prompt: None,
) -> Iterator[Sample]:
    """Yield the samples to train on; for sft also plain demonstrations: prompts with a label, or chats with answers.

    Pairwise algorithms also take plain preferences: rows with the answers `chosen` and `rejected`. `left_out` is called
    for demonstrations and preferences longer than `context`.
    """
    from slimectl.data.jsonl import read_samples

    if settings.algorithm.trains_on == "preferences" and path != "-" and not _has_tokens(path):
        from slimectl.data.preferences import open_preferences
        from slimectl.stages.preferences import preferred

        options = settings.rollout
        pairs = open_preferences(
            [path],
            input_key=options.input_key,
            metadata_key=options.metadata_key,
            tool_key=options.tool_key,
            shuffle_seed=options.seed if options.shuffle else None,
        )
        return preferred(pairs, text, options, context=context, left_out=left_out)
    if settings.algorithm.trains_on == "demonstrations" and path != "-" and not _has_tokens(path):
        from slimectl.stages.rollout import demonstrations

        return demonstrations(prompts(settings, [path]), text, settings.rollout, context=context, left_out=left_out)
    return read_samples(path, on_error=on_error, report=report, on_line=on_line)


def _has_tokens(path: str) -> bool:
    """Whether the first row is a sample rather than a prompt."""
    from slimectl.data.io import spool
    from slimectl.data.prompts import ordered_rows

    spool(path)  # it is read again from its beginning
    return any(isinstance(row, dict) and "tokens" in row for _, row in islice(ordered_rows([path]), 1))


def reward(settings: Settings) -> Grader:
    """Build the grader of samples; a reward model's folder is checked too. Raises SettingsError or CheckpointError."""
    path = settings.score.rm_options.get("path") if settings.score.rm_type == "reward_model" else None
    if isinstance(path, str) and (Path(path) / "config.json").exists():
        model_folder(path, setting="score.rm_options.path", verify=settings.model.verify)
    from slimectl.hooks.reward import UserReward

    return Grader(settings, UserReward)


def agent(settings: Settings) -> Agent | None:
    """Return the user's generate function, which may take the settings; None without one."""
    user_fn, args = hook(settings, "rollout.custom_generate_function_path"), FlatSettings(settings)
    if user_fn is None:
        return None

    from slimectl.hooks.rollout import as_agent

    return as_agent(user_fn, args)


def data_source(settings: Settings) -> Any:
    """Build the user's source of groups; None if prompts come from rollout.data."""
    user_fn, args = hook(settings, "rollout.data_source_path"), FlatSettings(settings)
    return None if user_fn is None else user_fn({"args": args, "settings": args})


def rollout_samples(
    settings: Settings,
    prompts: Iterator[Prompt],
    engine: Engine,
    text: Any,
    *,
    source: Any,
    left_out: Callable[[Prompt], Any],
) -> Iterator[Sample]:
    """Yield ungraded samples: of the rounds of the user's rollout function if there is one, else a group per prompt."""
    from slimectl.hooks.user_hooks import UserHooks
    from slimectl.stages.generation import GroupGenerator, single_turn
    from slimectl.stages.rollout import rollout
    from slimectl.stages.whole_rounds import whole_round_samples

    user_hooks, user_agent = UserHooks(settings), agent(settings)
    shared: dict[str, Any] = {"source": source, "epochs": settings.run.num_epoch or 1, "left_out": left_out}
    if user_hooks.sample_rounds is None:
        return rollout(prompts, engine, text, settings.rollout, agent=user_agent, hooks=user_hooks, **shared)
    attempts = GroupGenerator(
        engine,
        text,
        settings.rollout,
        user_agent or single_turn,
        on_sample=user_hooks.on_sample,
        agent_at=user_hooks.agent_at,
    )
    max_rounds = settings.run.num_rollout
    return whole_round_samples(prompts, attempts, user_hooks.sample_rounds, max_rounds=max_rounds, **shared)
