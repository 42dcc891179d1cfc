"""How progress is measured."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, field_validator, model_serializer
from pydantic_core import PydanticCustomError

from slimectl.settings.base import Section, Texts


class Dataset(Section):
    """One dataset with settings of its own; what is not given is as in [eval], then as in [rollout] and [score]."""

    path: str
    """Prompt source."""

    n_samples_per_prompt: Annotated[int, Field(ge=1)] | None = None
    """Answers for each prompt."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """Softmax temperature; 0 is greedy."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus probability."""

    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Most likely tokens to sample among; -1 for all."""

    max_response_len: Annotated[int, Field(ge=1)] | None = None
    """Tokens an answer may have."""

    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens an answer has at least."""

    stop: Texts | None = None
    """Strings that end an answer."""

    stop_token_ids: list[int] | None = None
    """Tokens that end an answer."""

    input_key: str | None = None
    """Key of the prompt."""

    label_key: str | None = None
    """Key of the right answer."""

    tool_key: str | None = None
    """Key of the tools."""

    metadata_key: str | None = None
    """Key of the metadata."""

    custom_generate_function_path: str | None = None
    """Your own generate function."""

    rm_type: str | None = None
    """Verifier; it goes before score.custom_rm_path and score.rm."""

    custom_rm_path: str | None = None
    """Your own reward function; it goes before rm_type."""

    reward_key: str | None = None
    """Which entry of a reward that is a dict counts."""

    success_threshold: float | None = None
    """Reward from which an answer counts as right."""

    @model_serializer(mode="wrap")
    def _given(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Only what is given: TOML has no null."""
        return {key: value for key, value in dump(self).items() if value is not None}


class EvalSettings(Section):
    """Held-out prompts in, pass rates out. What is not given here is as in [rollout] and [score]."""

    data: dict[str, str | Dataset] = {}
    """Datasets by name: each a prompt source, or a table [eval.data.NAME] with `path` and settings of its own."""

    @field_validator("data", mode="before")
    @classmethod
    def _explain_tables(cls, data: Any) -> Any:
        """One word about a wrong table, not one for each kind of value that there is."""
        for name, given in data.items() if isinstance(data, dict) else ():
            if isinstance(given, dict):
                try:
                    Dataset.model_validate(given)
                except ValidationError as error:
                    first = error.errors()[0]
                    key = ".".join(map(str, first["loc"]))
                    near = difflib.get_close_matches(key, Dataset.model_fields, n=1)
                    unknown = "unknown setting" + (f"; did you mean {near[0]}?" if near else "")
                    what = unknown if first["type"] == "extra_forbidden" else first["msg"]
                    raise PydanticCustomError(
                        "dataset", "{key}: {what}", {"key": f"{name}.{key}", "what": what}
                    ) from None
        return data

    interval: Annotated[int, Field(ge=1)] | None = None
    """Rollouts between evaluations; only before and after where not given."""

    skip_before_train: bool = False
    """Do not evaluate before the first step."""

    n_samples_per_prompt: Annotated[int, Field(ge=1)] = 1
    """Answers for each prompt; more make pass@k, avg@n and maj@n, and want a temperature above 0."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """Softmax temperature; 0 is greedy."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus probability."""

    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Most likely tokens to sample among; -1 for all."""

    max_response_len: Annotated[int, Field(ge=1)] | None = None
    """Tokens an answer may have."""

    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens an answer has at least."""

    rm_type: str | None = None
    """Verifier; it goes before score.custom_rm_path and score.rm."""

    reward_key: str | None = None
    """Which entry of a reward that is a dict counts."""

    success_threshold: float = 1.0
    """Reward from which an answer counts as right."""

    keep_samples: bool = True
    """Write the samples of each evaluation beside the run's metrics."""

    @property
    def datasets(self) -> dict[str, Dataset]:
        """All of `data` as tables."""
        return {name: Dataset(path=given) if isinstance(given, str) else given for name, given in self.data.items()}

    @property
    def sources(self) -> dict[str, str]:
        """The prompt source of each dataset."""
        return {name: dataset.path for name, dataset in self.datasets.items()}
