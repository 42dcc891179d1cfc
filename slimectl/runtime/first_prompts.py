"""Checks the first prompts of a source: reads, renders and grades them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

from slimectl.chats.model_tokens import end_tokens, unknown_token, unknown_tokens
from slimectl.data.chat import render
from slimectl.data.io import is_pipe
from slimectl.errors import SettingsError, SlimectlError
from slimectl.runtime import builders
from slimectl.runtime.capacity import is_readable
from slimectl.settings import Settings
from slimectl.stages.grader import Grader
from slimectl.stages.recorded_rounds import SampleFiles
from slimectl.stages.score import grading_error
from slimectl.system.stdio import logger
from slimectl.types import Prompt, Sample, Status

ROWS = 8
"""Rows of every source that are read."""
SHOWN = 48
"""Maximum characters of a prompt or label in a line."""


def first_prompts(settings: Settings, source: str, *, demonstrations: bool = False) -> list[Prompt]:
    """Read the first prompts of a source. Raises SettingsError if it has none."""
    rows = builders.prompts(settings, [source], shuffle=False, demonstrations=demonstrations)
    if prompts := list(islice(rows, ROWS)):
        return prompts
    raise SettingsError(f"{source}: no rows. Use a prompt source with rows.")


def check_source(settings: Settings, source: str, *, evaluation: bool = False, demonstrations: bool = False) -> str:
    """Read and render the first prompts of a source, including responses of `demonstrations`. Describe the first.

    Raises RecordError or SettingsError for anything that would stop a run: a template that cannot render them, a
    demonstration without a response, or a source in which no prompt fits.
    """
    if is_pipe(source):
        return f"{source}: a pipe, which is not read"
    prompts = first_prompts(settings, source, demonstrations=demonstrations)
    if (tokenizer := _tokenizer(settings)) is not None and not settings.rollout.function_path:
        if demonstrations:
            from slimectl.stages.rollout import demonstrations as demonstrated

            list(demonstrated(prompts, tokenizer, settings.rollout))
        elif not settings.has_agent:
            _render(settings, tokenizer, prompts, evaluation=evaluation)
    label = "no label" if prompts[0].label is None else f"label {shown(prompts[0].label)}"
    return f"{source}: {shown(prompts[0].text or prompts[0].source_location)}, {label}"


def _tokenizer(settings: Settings) -> Any | None:
    """Return the tokenizer of an existing model, or None for a model that is created or converted first."""
    path = settings.model.path
    if path is None or not is_readable(settings) or not builders.has_tokenizer(folder := builders.model_folder(path)):
        return None
    return builders.tokenizer(folder)


def name_model_tokens(settings: Settings) -> None:
    """Log end-of-turn tokens that only the chat template defines, and tokens without an embedding in the model."""
    if (tokenizer := _tokenizer(settings)) is None:
        return
    folder = builders.model_folder(settings.model.path)
    if not settings.rollout.ignore_eos:
        end_tokens(folder, tokenizer)
    if warning := unknown_tokens(folder, tokenizer):
        logger.warning(warning)


def _render(settings: Settings, tokenizer: Any, prompts: list[Prompt], *, evaluation: bool) -> None:
    from slimectl.stages.long_prompts import drop_long, prompt_excess

    folder = builders.model_folder(settings.model.path)
    rollout, context = settings.rollout, builders.context_length(settings.rollout, folder)
    excess = {}
    for prompt in prompts:
        tokens = render(
            prompt,
            tokenizer,
            apply_chat_template=rollout.apply_chat_template,
            template_kwargs=rollout.template_kwargs,
        )
        unknown = unknown_token(tokens, tokenizer)
        excess[prompt.index] = unknown or prompt_excess(len(tokens), rollout, context, evaluation=evaluation)
    if len(prompts) < ROWS:  # in a longer source, later prompts may fit
        list(drop_long(prompts, lambda prompt: prompt, lambda prompt: excess[prompt.index]))


def check_training_samples(settings: Settings, paths: Sequence[str]) -> None:
    """Read the first samples, demonstrations or preferences as training does. Raises RecordError."""
    if (tokenizer := _tokenizer(settings)) is not None:
        rows = builders.training_samples(settings, SampleFiles(paths), tokenizer)
        list(islice(rows, ROWS))


def check_grading(grader: Grader, prompts: list[Prompt]) -> None:
    """Grade an empty response to every prompt with the verifier of the settings or of the prompt.

    Raises RecordError for a label that the verifier cannot use, and HookError if it raises anything else. The user's
    own functions and servers are not called.
    """
    for prompt in prompts:
        sample = Sample(
            group_index=prompt.index,
            index=prompt.index,
            prompt=prompt.text,
            label=prompt.label,
            metadata=dict(prompt.metadata),
            extra=dict(prompt.extra),
            status=Status.COMPLETED,
        )
        verifier = grader.verifier_of(sample)
        if not verifier.runs_user_code and not verifier.is_async:
            try:
                verifier(sample)
            except SlimectlError:
                raise
            except Exception as error:  # a third-party verifier may raise anything
                raise grading_error(grader, sample, error) from error


def shown(value: object) -> str:
    """Return a value as JSON, truncated to SHOWN characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
