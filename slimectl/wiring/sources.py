"""Settings to what goes through the stages: prompts, samples, rewards, agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.errors import HookError, SettingsError
from slimectl.hooks import Args, Hook
from slimectl.settings import Settings
from slimectl.settings.algorithm import Pairwise, Sft
from slimectl.stages.score import Grader
from slimectl.types import Prompt, Sample

if TYPE_CHECKING:
    from slimectl.ports import Agent, FromBuffer, Keep

AGENT_OFFERS = ("args", "settings", "sample", "sampling_params", "generate", "evaluation", "tokenizer")


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
        weights=given.data_weights if sources == list(given.data) else None,
        mix_seed=given.seed,
        epochs=epochs,
        start=start,
    )


def training_samples(
    settings: Settings, path: str, text: Any, *, on_error: str, report: Callable[[str], None]
) -> Iterator[Sample]:
    """The samples to train on; for sft also plain demonstrations: prompts with a label, or chats with answers.

    For what learns from pairs also plain preferences: prompts with answers `chosen` and `rejected`.
    """
    from slimectl.data.jsonl import read_samples

    if isinstance(settings.algorithm, Pairwise) and path != "-" and not _has_tokens(Path(path)):
        from slimectl.stages.preferences import preferred

        keyed = [settings.rollout.model_copy(update={"label_key": key}) for key in ("chosen", "rejected")]
        chosen, rejected = (prompts(settings.model_copy(update={"rollout": given}), [path]) for given in keyed)
        return preferred(chosen, rejected, text, settings.rollout)
    if isinstance(settings.algorithm, Sft) and path != "-" and not _has_tokens(Path(path)):
        from slimectl.stages.rollout import demonstrations

        return demonstrations(prompts(settings, [path]), text, settings.rollout)
    return read_samples(path, on_error=on_error, report=report)


def _has_tokens(path: Path) -> bool:
    """Whether the first line is a sample rather than a prompt."""
    from slimectl.data.jsonl import read_lines

    return any("tokens" in line for _, line in islice(read_lines(path), 1))


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
    def asked(offered: Mapping[str, Any]) -> Any:
        return hook.bare({**offered, "args": args, "settings": args})

    asked.resumes = getattr(hook.function, "resumes", False)  # type: ignore[attr-defined]
    return asked


def keep(settings: Settings) -> Keep | None:
    """The filter of finished groups."""
    path = settings.rollout.dynamic_sampling_filter_path
    if path is None:
        return None
    offers = ("args", "settings", "samples")
    hook, args = Hook(path, setting="rollout.dynamic_sampling_filter_path", offers=offers), Args(settings)
    return lambda samples: hook({"args": args, "settings": args, "samples": samples})


def from_buffer(settings: Settings) -> FromBuffer | None:
    """Who picks among the groups that wait."""
    path = settings.rollout.buffer_filter_path
    if path is None:
        return None
    offers = ("args", "settings", "rollout_id", "buffer", "num_samples")
    hook, args = Hook(path, setting="rollout.buffer_filter_path", offers=offers), Args(settings)

    def picked(buffer: list[list[Sample]], count: int, rollout_id: int) -> list[list[Sample]]:
        offered = {"args": args, "settings": args, "rollout_id": rollout_id, "buffer": buffer, "num_samples": count}
        groups = hook(offered)
        if not isinstance(groups, list) or not all(isinstance(group, list) and group for group in groups):
            raise HookError(f"rollout.buffer_filter_path: {path} returned {groups!r:.60}; return a list of groups")
        return groups

    return picked
