"""Settings of evaluation."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, field_validator, model_serializer
from pydantic_core import PydanticCustomError

from slimectl.settings.base import AdditivePenalty, RepetitionPenalty, Section, Texts


class Overrides(Section):
    """Sampling and grading that evaluation may do differently. Unset keys fall back to [rollout] and [score]."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """Softmax temperature. 0 is greedy."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus probability."""

    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Sample from this many most likely tokens. -1 means all."""

    repetition_penalty: RepetitionPenalty | None = None
    """Factor on the logits of tokens that the response already has. 1 is off."""

    presence_penalty: AdditivePenalty | None = None
    """Subtracted from the logits of tokens that the response already has. 0 is off."""

    frequency_penalty: AdditivePenalty | None = None
    """Subtracted from the logit of a token for each time that the response already has it. 0 is off."""

    max_response_len: Annotated[int, Field(ge=1)] | None = None
    """Maximum tokens of a response."""

    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    """Minimum tokens of a response."""

    rm_type: str | None = None
    """Verifier. It overrides score.custom_rm_path and score.rm."""

    reward_key: str | None = None
    """Key of the number to use if a reward is a dict."""


class Dataset(Overrides):
    """One dataset with its own settings. Unset keys fall back to [eval], then to [rollout] and [score]."""

    path: str
    """Prompt source."""

    n_samples_per_prompt: Annotated[int, Field(ge=1)] | None = None
    """Responses per prompt."""

    stop: Texts | None = None
    """Strings that end a response."""

    stop_token_ids: list[int] | None = None
    """Token ids that end a response."""

    input_key: str | None = None
    """Column of the prompt."""

    label_key: str | None = None
    """Column of the ground truth."""

    tool_key: str | None = None
    """Column of the tool schemas."""

    metadata_key: str | None = None
    """Column of the metadata."""

    custom_generate_function_path: str | None = None
    """Your own generate function."""

    custom_rm_path: str | None = None
    """Your own reward function, instead of rm_type."""

    success_threshold: float | None = None
    """Reward from which a response counts as correct."""

    @model_serializer(mode="wrap")
    def _drop_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Drop unset values: TOML has no null."""
        return {key: value for key, value in dump(self).items() if value is not None}


class EvalSettings(Overrides):
    """Evaluation on held-out prompts. Unset keys fall back to [rollout] and [score]."""

    section_name: ClassVar[str] = "eval"

    data: dict[str, str | Dataset] = {}
    """Datasets by name: each a prompt source, or a table [eval.data.NAME] with `path` and its own settings. For
    demonstrations and preferences without a verifier, `slimectl train` measures the loss."""

    @field_validator("data", mode="before")
    @classmethod
    def _explain_tables(cls, data: Any) -> Any:
        """Report one error for an invalid table, not one per member of the union."""
        for name, entry in data.items() if isinstance(data, dict) else ():
            if isinstance(entry, dict):
                try:
                    Dataset.model_validate(entry)
                except ValidationError as error:
                    first = error.errors()[0]
                    key = ".".join(map(str, first["loc"]))
                    near = difflib.get_close_matches(key, Dataset.model_fields, n=1)
                    unknown = "unknown setting" + (f". Did you mean {near[0]}?" if near else "")
                    message = unknown if first["type"] == "extra_forbidden" else first["msg"]
                    raise PydanticCustomError(
                        "dataset", "{key}: {what}", {"key": f"{name}.{key}", "what": message}
                    ) from None
        return data

    interval: Annotated[int, Field(ge=1)] | None = None
    """Rollouts between evaluations. Default: only before and after the run."""

    before_train: bool = True
    """Evaluate before the first step."""

    n_samples_per_prompt: Annotated[int, Field(ge=1)] = 1
    """Responses per prompt. More than one gives pass@k, avg@n and maj@n, and needs a temperature above 0."""

    success_threshold: float = 1.0
    """Reward from which a response counts as correct."""

    keep_samples: bool = True
    """Write the samples of each evaluation into the run's folder."""

    @property
    def datasets(self) -> dict[str, Dataset]:
        """All entries of `data` as tables."""
        return {name: Dataset(path=entry) if isinstance(entry, str) else entry for name, entry in self.data.items()}

    @property
    def sources(self) -> dict[str, str]:
        """The prompt source of each dataset."""
        return {name: dataset.path for name, dataset in self.datasets.items()}
