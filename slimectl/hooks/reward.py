"""Calls a user's reward function and validates its rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from slimectl.chats.tokenizer import tokenizer_of
from slimectl.data.columns import ANSWERS, QUESTIONS
from slimectl.data.json_values import plain_reward
from slimectl.errors import HookError
from slimectl.hooks.args import FlatSettings
from slimectl.hooks.registry import HOOKS
from slimectl.plugins.containment import in_one_line
from slimectl.settings import Settings
from slimectl.types import Sample, detached_copy

SETTING = "score.custom_rm_path"
COLUMNS = ("prompts", "completions", "queries", "solution_strs")
"""Parameters of a function of many samples whose parts are lists, as in TRL, OpenRLHF and verl's batch manager."""
NAMES = (
    "prompt", "completion", "response", "label", "ground_truth", "solution_str", "data_source", "extra_info",
)  # fmt: skip
"""Parameters of a function of the parts of one sample, as in verl."""
PLURALS = {"prompt": "prompts", "completion": "completions"}
"""Names of these parts in a function of many samples."""
BATCH = {f"{name}s": name for name in ("data_source", "solution_str", "ground_truth", "extra_info")}
"""Names of these parts in a function of verl's batch manager."""


_tokenizer = cache(tokenizer_of)


class OfSample:
    """Calls a function of one sample whose parameter has another name, or no readable name."""

    def __init__(self, function: Callable[[Sample], Any]) -> None:
        self.function = function
        self.__module__ = getattr(function, "__module__", __name__)  # errors quote lines of this module

    def __call__(self, sample: Sample) -> Any:
        return self.function(sample)


def of_sample(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the parameter `sample`, if the given one accepts one sample under another name.

    >>> of_sample(lambda each: each.index)(sample=Sample(index=7))
    7
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C
        return OfSample(function)
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(required) != 1 or required[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return function
    known = {"args", "settings", "sample", "samples", *COLUMNS, *NAMES}
    takes_name = required[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return function if takes_name and required[0].name in known else OfSample(function)


class UserReward:
    """A user's reward function, loaded from a path or given, and called with one sample or many.

    `setting` is the setting that errors quote. Raises HookError if its parameters do not fit.
    """

    def __init__(self, source: str | Callable[..., Any], settings: Settings, setting: str = SETTING) -> None:
        path, function = source, None
        if not isinstance(source, str):
            path, function = getattr(source, "__qualname__", type(source).__name__), of_sample(source)
        self._args, batched = FlatSettings(settings), settings.score.group_rm
        self._hook = HOOKS[SETTING].load(str(path), setting=setting, function=function, batched=batched)
        self.path = self._hook.path
        function, names = self._hook.function, set(self._hook.wanted)
        self._skips_none = settings.score.none_reward == "skip"
        self._custom = settings.custom.entries()
        self.takes_many = bool(names & {"samples", *COLUMNS})
        self._by_name = not names & {"sample", "samples"} and bool(names & {*COLUMNS, *NAMES})
        self._label_names = {settings.rollout.label_key, *ANSWERS}
        self._prompt_names = {settings.rollout.input_key, *QUESTIONS}
        if setting == SETTING and settings.score.group_rm and not self.takes_many:
            raise HookError(f"{self.name}: score.group_rm needs a function that takes `samples`. Add the parameter.")
        function = function.function if isinstance(function, OfSample) else function
        if inspect.isclass(function):
            raise HookError(f"{self.name} is a class. Create an instance in that file and name the instance.")
        call_method = getattr(function, "__call__", None)  # noqa: B004  the object's own __call__ may be async
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)

    @property
    def name(self) -> str:
        """Setting and path of the function, for errors."""
        return self._hook.name

    def called(self, samples: Sequence[Sample]) -> Any:
        """Return the function's result, or an awaitable of it. It gets copies, so grading does not change samples."""
        copies = [detached_copy(sample) for sample in samples]
        if self._by_name:
            arguments = self._named(copies)
        else:
            arguments = {"samples": copies} if self.takes_many else {"sample": copies[0]}
        return self._hook.begin({"args": self._args, "settings": self._args, **arguments})

    def _named(self, samples: list[Sample]) -> dict[str, Any]:
        """Return the parts of the samples by name. They are lists if the function accepts many samples.

        Raises HookError if it needs a name that no row has.
        """
        rows = [self._parts(sample) for sample in samples]
        if self.takes_many:
            rows = [{PLURALS.get(name, name): value for name, value in row.items()} for row in rows]
        if self.takes_many and (batch := {name: BATCH[name] for name in self._hook.wanted if name in BATCH}):
            rows = [row | {name: row.get(part) for name, part in batch.items()} for row in rows]
        if "queries" in self._hook.wanted:
            rows = [row | self._texts(sample) for row, sample in zip(rows, samples, strict=True)]
        names = list(dict.fromkeys(name for row in rows for name in row))
        if missing := [name for name in self._hook.required if name not in {*names, *self._custom, "args", "settings"}]:
            raise HookError(
                f"{self.name} wants {', '.join(missing)}, which the rows do not have. "
                f"Their keys are {', '.join(names)}."
            )
        parts = {name: [row.get(name) for row in rows] for name in names} if self.takes_many else rows[0]
        return {**self._custom, **parts}

    def _texts(self, sample: Sample) -> dict[str, Any]:
        """Return the parts of a sample with OpenRLHF's names: prompt and response as one text, with its markup.

        Raises HookError for a chat whose text is not known.
        """
        count, path = sample.prompt_length, self._args.model.path
        if sample.tokens and path:
            decode = _tokenizer(path).decode
            prompt, query = (
                decode(tokens, skip_special_tokens=False) for tokens in (sample.tokens[:count], sample.tokens)
            )
        elif isinstance(sample.prompt, str):
            prompt, query = sample.prompt, sample.prompt + sample.response
        else:
            raise HookError(
                f"{self.name} needs queries, but the samples only have the tokens of a chat, not its text. "
                "Set model.path, and score samples that `slimectl rollout` made."
            )
        return {"queries": query, "prompts": prompt, "labels": sample.label}

    def _parts(self, sample: Sample) -> dict[str, Any]:
        """Return the parts of one sample under the names that reward functions of other programs use."""
        chat, label = not isinstance(sample.prompt, str), sample.label
        row, metadata = sample.extra, sample.metadata
        parts = {
            "label": label,
            "ground_truth": label,
            "data_source": metadata.get("data_source", ""),
            "extra_info": metadata,
            "metadata": metadata,
            **row,
            # A row may have a completion by someone else.
            "prompt": sample.prompt,
            "completion": [{"role": "assistant", "content": sample.response}] if chat else sample.response,
            "completion_ids": sample.tokens[sample.prompt_length :],
            "response": sample.response,
            "solution_str": sample.response,
        }
        for name in self._hook.wanted:
            if name not in parts and name in self._label_names:
                parts[name] = label
            elif name not in parts and name in self._prompt_names:
                parts[name] = sample.prompt[-1].get("content") if isinstance(sample.prompt, list) else sample.prompt
        return parts

    def rewards(self, returned: Any, samples: Sequence[Sample]) -> list[Any]:
        """Return one reward per sample. Raises HookError if the number differs."""
        if not self.takes_many:
            return [self._plain(returned, samples[0])]
        if "queries" in self._hook.wanted and isinstance(
            returned, dict
        ):  # OpenRLHF's result, with scores and extra_logs
            returned = returned.get("rewards")
        try:
            values = returned.tolist() if hasattr(returned, "tolist") else returned
        except Exception as error:
            raise HookError(f"{self.name}: its rewards cannot be read: {in_one_line(error)}. Return a list.") from error
        if not isinstance(values, list | tuple):
            raise HookError(
                f"{self.name} returned {type(returned).__name__} for {len(samples)} samples. "
                f"Return a list with one reward for each."
            )
        if len(values) != len(samples):
            raise HookError(
                f"{self.name} returned {len(values)} rewards for {len(samples)} samples. Return one for each."
            )
        return [self._plain(reward, sample) for reward, sample in zip(values, samples, strict=True)]

    def _plain(self, reward: Any, sample: Sample) -> Any:
        """Return the reward as plain JSON values, or None for no opinion.

        Raises HookError, with the index of the sample, for other values.
        """
        if reward is None and self._skips_none:
            return None
        try:
            return plain_reward(reward)
        except ValueError as error:
            raise HookError(f"{self.name}: reward of sample {sample.index} {error}") from None
