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
    """Prompt sources: files, globs, path@[a:b] slices, -, folders of save_to_disk, data sets of the hub (org/name,
    org/name/FILES), reasoning_gym:TASK?key=value, module:function?key=value, and env, the tasks of `env` below."""

    data_weights: list[Annotated[float, Field(gt=0)]] = []
    """Mix the sources of `data`: how often a prompt comes from each, in proportion; one after another where empty."""

    input_key: str = "prompt"
    """Key of the prompt in a row: a string, or a chat list of {role, content}. A dotted key is a path into objects.
    Where a row has no `prompt`, the columns of other published formats are recognized (docs/records.md)."""

    label_key: str = "label"
    """Key of the ground truth in a row, e.g. reward_model.ground_truth; where there is no `label`, the column of an
    answer."""

    metadata_key: str = "metadata"
    """Key of the metadata in a row."""

    tool_key: str = "tools"
    """Key of the tool schemas in a row."""

    image_key: str = "images"
    """Key of the images in a row: paths relative to the file's folder, or objects with `path` or `bytes`. Each replaces
    one <image> in the prompt, or a part of type "image". With the default, `image`, `image_path` and other usual names
    are recognized too (docs/vision.md)."""

    apply_chat_template: bool = False
    """Wrap string prompts as one user message in the model's chat template; chat lists always are. Where it is not set
    and the model has a template, a string prompt is sampled from as it stands, with a warning."""

    apply_chat_template_kwargs: dict[str, Any] = {}
    """Extra arguments for the chat template, e.g. {enable_thinking = false}."""

    template_date: str | None = None
    """Date that a chat template prints as today's, YYYY-MM-DD. If not set, a template prints the current date. A run
    keeps the date of its first start, so a resumed run has the same prompts."""

    shuffle: bool = False
    """Shuffle the prompts anew in every epoch, by `rollout.seed`."""

    seed: int = 42
    """Seed of sampling and shuffling: the same seed draws the same answers."""

    n_samples_per_prompt: PositiveInt = 8
    """Answers for each prompt; GRPO compares them with one another."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature; positive, because greedy decoding is not a policy."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus: sample among the most likely tokens of this total probability."""

    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among this many most likely tokens; -1 for all."""

    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample among tokens at least this fraction as likely as the likeliest."""

    repetition_penalty: RepetitionPenalty = 1.0
    """Divide positive logits of tokens that the response already has by this, and multiply negative ones by it; 1 is
    off. vLLM also counts the tokens of the prompt. See docs/algorithms.md on training with penalties."""

    presence_penalty: AdditivePenalty = 0.0
    """Subtract this from the logits of tokens that the response already has; 0 is off."""

    frequency_penalty: AdditivePenalty = 0.0
    """Subtract this from the logit of a token for each time that the response already has it; 0 is off."""

    max_response_len: PositiveInt = 256
    """Maximum tokens of a response."""

    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens an answer has at least before it may end."""

    max_context_len: PositiveInt | None = None
    """Tokens of prompt and answer together; the model's own limit where not given."""

    stop: Texts = []
    """Strings that end an answer (cut from its text)."""

    stop_token_ids: list[int] = []
    """Token ids that end an answer, besides the model's end token."""

    skip_special_tokens: bool = True
    """Leave special tokens out of a response's text. With false they stay, so stop strings and rewards see a `</think>`
    or a channel that is a special token. The token that ends the response is always left out."""

    ignore_eos: bool = False
    """Go on past the model's end token."""

    max_prompt_len: PositiveInt | None = None
    """Tokens a prompt may have; longer ones are left out and counted."""

    over_sampling_batch_size: PositiveInt | None = None
    """Prompts begun at the start of a round; groups beyond run.rollout_batch_size wait, finished, for the next one."""

    dynamic_sampling_filter_path: str | None = None
    """Function of (args, samples): whether a finished group is trained on; for each that is not, another is drawn.
    slimectl.stages.filters:nonzero_std wants rewards that differ."""

    buffer_filter_path: str | None = None
    """Function of (args, rollout_id, buffer, num_samples): which waiting groups a round begins with."""

    partial_rollout: bool = False
    """Take groups as they finish; what is unfinished then is broken off, and goes on with its tokens next round."""

    mask_offpolicy_in_partial_rollout: bool = False
    """Do not train on what older weights wrote of an answer that went on."""

    custom_generate_function_path: str | None = None
    """Your own async function for one attempt (multi-turn, tools), by path; for all attempts at a prompt where it asks
    for `samples`."""

    agent: str | None = None
    """A program that is one attempt, e.g. "python agent.py": it is started for each sample, finds the policy at
    OPENAI_BASE_URL or ANTHROPIC_BASE_URL and its task on stdin (docs/agents.md). No shell reads the command."""

    max_failed: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the attempts that may fail with an error. Above it, a round ends the run, and `rollout` and `eval` exit
    with status 1. They also do if all attempts fail."""

    agent_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that its attempt may take beside the policy's answers; then it is ended with all that it started."""

    agent_max_turns: PositiveInt = 64
    """Answers of the policy in one attempt; a further request is refused."""

    agent_retries: Annotated[int, Field(ge=0)] = 1
    """Further attempts of a program that died through no fault of the model: by a signal, with exit status 75, or with
    another error before the policy answered."""

    agent_concurrency: PositiveInt = 16
    """Programs that run at the same time."""

    agent_model: str = "*"
    """Name by which the program must ask for the policy; * is any name."""

    env: str | None = None
    """An environment that the policy plays in, KIND:ID, e.g. gymnasium:FrozenLake-v1; the kinds are gymnasium,
    textarena, reasoning_gym, verifiers, openenv, mcp, harbor, and python for a class of your own
    (docs/environments.md). Its tasks are the data source `env`, those that are held out `env:eval`; without `data`, env
    is it."""

    env_args: dict[str, Any] = {}
    """Arguments with which the environment is made, e.g. {is_slippery = false}."""

    env_python: str | None = None
    """Python in which the environment runs, for packages that do not go with slimectl's; that of slimectl where not
    given."""

    env_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that an environment may take for an episode beside the policy's answers; then its process is ended, and
    the episode is played again."""

    env_max_turns: PositiveInt = 64
    """Answers of the policy in an episode, of all players together."""

    env_turn_tokens: PositiveInt | None = None
    """Tokens of one answer; `max_response_len` bounds a whole chat where not given."""

    env_retries: Annotated[int, Field(ge=0)] = 1
    """Further episodes in place of one whose environment raised, died or took too long; then the sample has failed."""

    env_concurrency: PositiveInt = 64
    """Episodes at the same time, a process each."""

    allow_paths_in_records: bool = False
    """Let a sample name its own generate function (generate_function_path), and a prompt the file that the search agent
    reads (metadata.corpus): only for data that you trust."""

    tool_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that it may spend between two answers of the model; an attempt whose tools take longer has failed."""

    function_path: str | None = None
    """Your own function for whole rounds, by path, in place of the loop over prompts."""

    data_source_path: str | None = None
    """Your own class that groups come from, by path, in place of `data`; saved and restored with the run."""

    sample_hook_path: Texts = []
    """Functions that see, and may change, every sample that has been generated, one after another."""

    sample_filter_path: str | None = None
    """Function of (args, data): sets remove_sample of samples that are not to be trained on."""

    all_samples_process_path: str | None = None
    """Function of (args, all_samples, data_source) that sees the groups of a round, those filtered out included."""

    data_postprocess_path: str | None = None
    """Function of (args, rollout_id, rollout_data) that may change what of a round is trained on."""

    @property
    def penalties(self) -> dict[str, float]:
        """Penalties that have an effect."""
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return {name: value for name, off in neutral.items() if (value := getattr(self, name)) != off}

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of the chat template, including the date that it prints."""
        pinned = {} if self.template_date is None else {"strftime_now": self.template_date}
        return {**self.apply_chat_template_kwargs, **pinned}

    @field_validator("template_date", mode="before")
    @classmethod
    def _check_date(cls, value: Any) -> Any:
        """Read a date, as a text or as TOML's date without quotes."""
        text = value.isoformat() if isinstance(value, datetime.date) else value
        try:
            return datetime.date.fromisoformat(text).isoformat() if isinstance(text, str) else text
        except ValueError:
            raise PydanticCustomError("date", "{text} is not a date. Write it as YYYY-MM-DD.", {"text": text}) from None

    @field_validator("env")
    @classmethod
    def _check_environment(cls, name: str | None) -> str | None:
        """Refuse a name without a kind."""
        if name is not None and not all(name.partition(":")):
            raise PydanticCustomError("environment", "{name}: write it as KIND:ID", {"name": name})
        return name

    @model_validator(mode="after")
    def _play_all_tasks(self) -> Self:
        """Take the tasks of an environment as data where no data is named."""
        if self.env is not None and not self.data:
            self.__dict__["data"] = ["env"]
        return self
