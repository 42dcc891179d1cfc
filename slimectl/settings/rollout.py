"""Settings of rollout: prompts and sampling."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from slimectl.settings.base import AdditivePenalty, PositiveInt, RepetitionPenalty, Section, Texts


class RolloutSettings(Section):
    """Prompts in, samples out."""

    data: Texts = []
    """Prompt sources: files, globs, path@[a:b] slices, - for stdin, save_to_disk folders, datasets on the Hub
    (org/name, org/name/FILES), reasoning_gym:TASK?key=value, module:function?key=value, and env, the tasks of `env`
    below."""

    data_weights: list[Annotated[float, Field(gt=0)]] = []
    """Sampling weight of each source in `data`. Empty: one source after another."""

    domain_weights: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Sampling weight of each domain, e.g. {math = 0.6, code = 0.4}. Rows of other domains are left out. Empty: rows in
    their order."""

    easy_threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """Difficulty pools of a run: a prompt is easy if at least this share of its last responses succeeded
    (eval.success_threshold). Default: none is easy."""

    hard_threshold: Annotated[float, Field(ge=0, lt=1)] | None = None
    """A prompt is hard if at most this share of its last responses succeeded. Default: none is hard."""

    easy_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of prompts that are drawn from the easy ones."""

    hard_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of prompts that are drawn from the hard ones. All others are new, or neither easy nor hard."""

    retire_after: PositiveInt | None = None
    """Stop drawing a prompt when all its responses succeeded this many times in a row. Default: never."""

    input_key: str = "prompt"
    """Column of the prompt: a string, or a chat as a list of {role, content}. A dotted key is a path into objects. If a
    row has no `prompt`, the columns of other published formats are recognized (docs/reference/prompts.md)."""

    label_key: str = "label"
    """Column of the ground truth, e.g. reward_model.ground_truth. If a row has no `label`, its answer column is
    used."""

    metadata_key: str = "metadata"
    """Column of the metadata."""

    domain_key: str = "domain"
    """Column, or key of the metadata, with the domain of a prompt. domain_weights mix prompts by it, and
    algorithm.opd_teachers chooses teachers by it."""

    tool_key: str = "tools"
    """Column of the tool schemas."""

    image_key: str = "images"
    """Column of the images: paths relative to the file's folder, or objects with `path` or `bytes`. Each image replaces
    one <image> in the prompt, or a part of type "image". With the default, `image`, `image_path` and other usual names
    are recognized too (docs/vision.md)."""

    apply_chat_template: bool = False
    """Wrap string prompts as one user message in the model's chat template. Chats always use the template. If unset,
    string prompts are sent without it, with a warning if the model has one."""

    apply_chat_template_kwargs: dict[str, Any] = {}
    """Extra arguments for the chat template, e.g. {enable_thinking = false}."""

    template_date: str | None = None
    """Date that a chat template prints as today's, YYYY-MM-DD. If not set, a template prints the current date. A run
    keeps the date of its first start, so a resumed run has the same prompts."""

    shuffle: bool = False
    """Shuffle the prompts in every epoch, seeded by `rollout.seed`."""

    seed: int = 42
    """Seed of sampling and shuffling. The same seed gives the same responses."""

    n_samples_per_prompt: PositiveInt = 8
    """Responses per prompt. GRPO compares them with each other."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature for sampling. It must be positive: greedy decoding is not a policy."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability."""

    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample from this many most likely tokens. -1 means all."""

    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from tokens with at least this fraction of the highest probability."""

    repetition_penalty: RepetitionPenalty = 1.0
    """For tokens that the response already has, divide positive logits by this and multiply negative ones. 1 is off.
    vLLM also counts the tokens of the prompt. See docs/algorithms.md on training with penalties."""

    presence_penalty: AdditivePenalty = 0.0
    """Subtract this from the logits of tokens that the response already has. 0 is off."""

    frequency_penalty: AdditivePenalty = 0.0
    """Subtract this from the logit of a token for each time that the response already has it. 0 is off."""

    max_response_len: PositiveInt = 256
    """Maximum tokens of a response."""

    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """Minimum tokens of a response."""

    max_context_len: PositiveInt | None = None
    """Maximum tokens of prompt and response together. Default: the model's limit."""

    stop: Texts = []
    """Strings that end a response. They are cut from its text. A string that is one special token is a stop token."""

    stop_token_ids: list[int] = []
    """Token ids that end a response, in addition to the end tokens of the model and its chat template."""

    skip_special_tokens: bool = True
    """Leave special tokens out of a response's text. With false they stay, so stop strings and rewards see a `</think>`
    or a channel that is a special token. The token that ends the response is always left out."""

    ignore_eos: bool = False
    """Continue after the model's end token."""

    top_log_probs: Annotated[int, Field(ge=0, le=1024)] = 0
    """Record this many of the likeliest tokens in place of every token, as teacher_top_log_probs. A student learns from
    the file with algorithm.opd_top_k."""

    max_prompt_len: PositiveInt | None = None
    """Maximum tokens of a prompt. Longer prompts are skipped and counted."""

    over_sampling_batch_size: PositiveInt | None = None
    """Prompts to start in a round. Finished groups beyond run.rollout_batch_size wait for the next round."""

    dynamic_sampling_filter_path: str | None = None
    """Path of a function (args, samples) that decides whether to train on a finished group. Each rejected group is
    replaced by a new one. slimectl.stages.filters:nonzero_std keeps groups whose rewards differ."""

    buffer_filter_path: str | None = None
    """Path of a function (args, rollout_id, buffer, num_samples) that selects the waiting groups with which a round
    starts."""

    partial_rollout: bool = False
    """Take groups as they finish. Unfinished responses are interrupted and continued in the next round."""

    mask_offpolicy_in_partial_rollout: bool = False
    """Do not train on the tokens of a continued response that older weights wrote."""

    custom_generate_function_path: str | None = None
    """Path of your own async function for one attempt (multi-turn, tools). If it takes `samples`, it handles all
    attempts at a prompt."""

    agent: str | None = None
    """Program to run for each attempt, e.g. "python agent.py". It finds the policy at OPENAI_BASE_URL or
    ANTHROPIC_BASE_URL and its task on stdin (docs/agents.md). The command is not run through a shell."""

    max_failed: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the attempts that may fail with an error. Above it, a round ends the run, and `rollout` and `eval` exit
    with status 1. They also do if all attempts fail."""

    agent_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time limit of an attempt in seconds, without the time of the policy's responses. The program is then ended with
    all processes that it started."""

    agent_max_turns: PositiveInt = 64
    """Maximum responses of the policy in one attempt. Further requests are refused."""

    agent_retries: Annotated[int, Field(ge=0)] = 1
    """Retries of a program that failed for reasons other than the model: a signal, exit status 75, or another error
    before the first response."""

    agent_concurrency: PositiveInt = 16
    """Maximum number of programs that run at the same time."""

    agent_model: str = "*"
    """Model name that the program must request. * accepts any name."""

    env: str | None = None
    """Environment in which the policy acts, KIND:ID, e.g. gymnasium:FrozenLake-v1. Kinds are gymnasium, textarena,
    reasoning_gym, verifiers, openenv, mcp, harbor, and python for your own class (docs/environments.md). Its tasks are
    the data source `env`, and held-out tasks are `env:eval`. If `data` is empty, env is used."""

    env_args: dict[str, Any] = {}
    """Arguments to create the environment, e.g. {is_slippery = false}."""

    env_python: str | None = None
    """Python interpreter for the environment, if its packages conflict with slimectl's. Default: slimectl's own."""

    env_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Time limit of an episode in seconds, without the time of the policy's responses. Its process is then ended, and
    the episode is played again."""

    env_max_turns: PositiveInt = 64
    """Maximum responses of the policy in an episode, over all players."""

    env_turn_tokens: PositiveInt | None = None
    """Maximum tokens of one response. Default: `max_response_len`, which bounds the whole chat."""

    env_retries: Annotated[int, Field(ge=0)] = 1
    """Replacement episodes if the environment raised an error, died or took too long. After that the sample has
    failed."""

    env_concurrency: PositiveInt = 64
    """Maximum number of episodes at the same time. Each is a process."""

    allow_paths_in_records: bool = False
    """Let a sample name its own generate function (generate_function_path), and a prompt the file that the search agent
    reads (metadata.corpus). Use it only for data that you trust."""

    tool_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Time limit in seconds between two responses of the model. An attempt whose tools take longer fails."""

    function_path: str | None = None
    """Path of your own function for whole rounds, instead of the loop over prompts."""

    data_source_path: str | None = None
    """Path of your own class that supplies groups, instead of `data`. Its state is saved and restored with the run."""

    sample_hook_path: Texts = []
    """Paths of functions that receive every generated sample and may change it, in order."""

    sample_filter_path: str | None = None
    """Path of a function (args, data) that sets remove_sample on samples to exclude from training."""

    all_samples_process_path: str | None = None
    """Path of a function (args, all_samples, data_source) that receives all groups of a round, including filtered
    ones."""

    data_postprocess_path: str | None = None
    """Path of a function (args, rollout_id, rollout_data) that may change the training data of a round."""

    @property
    def penalties(self) -> dict[str, float]:
        """Penalties that have an effect."""
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return {name: value for name, off in neutral.items() if (value := getattr(self, name)) != off}

    @property
    def uses_pools(self) -> bool:
        """Whether prompts are drawn by their difficulty."""
        return any(value is not None for value in (self.easy_threshold, self.hard_threshold, self.retire_after))

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of the chat template, including the date that it prints."""
        pinned = {} if self.template_date is None else {"strftime_now": self.template_date}
        return {**self.apply_chat_template_kwargs, **pinned}

    @field_validator("template_date", mode="before")
    @classmethod
    def _check_date(cls, value: Any) -> Any:
        """Accept a date as a string or as a Python date."""
        text = value.isoformat() if isinstance(value, datetime.date) else value
        try:
            return datetime.date.fromisoformat(text).isoformat() if isinstance(text, str) else text
        except ValueError:
            raise PydanticCustomError("date", "{text} is not a date. Write it as YYYY-MM-DD.", {"text": text}) from None

    @field_validator("env")
    @classmethod
    def _check_environment(cls, name: str | None) -> str | None:
        """Reject a name without a kind."""
        if name is not None and not all(name.partition(":")):
            raise PydanticCustomError("environment", "{name}: write it as KIND:ID", {"name": name})
        return name

    @model_validator(mode="after")
    def _play_all_tasks(self) -> Self:
        """Use the tasks of the environment as data if no data is set."""
        if self.env is not None and not self.data:
            self.__dict__["data"] = ["env"]
        return self
