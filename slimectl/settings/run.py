"""Settings of the run loop, its supervised warm-up (SFT) and its trackers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from slimectl.plugins.registry import TRACKERS
from slimectl.settings.base import ListOfTexts, PositiveInt, Section, Texts, registered_in
from slimectl.settings.secret import Key
from slimectl.system.redaction import is_reference

TrackerName = Annotated[str, *registered_in(TRACKERS)]
OWN_TRACKERS = ("stdout", "jsonl")
"""Trackers without a library."""
KEY_VARIABLES = {"wandb": "WANDB_API_KEY", "swanlab": "SWANLAB_API_KEY", "mlflow": "MLFLOW_TRACKING_TOKEN"}
"""Trackers with an account, and the environment variable of its key."""
SECRETS = ("key", "token", "password", "secret")
"""Last parts of argument names that mark a secret."""


class RunSettings(Section):
    """Rounds of rollout, score and train, and their checkpoints."""

    section_name: ClassVar[str] = "run"

    name: str | None = None
    """Name of the run's folder under run.dir. Default: the name of the recipe."""

    dir: str = "runs"
    """Folder of all runs."""

    num_rollout: PositiveInt | None = None
    """Rounds to run."""

    num_epoch: PositiveInt | None = None
    """Passes over the prompts. Use it instead of num_rollout."""

    rollout_batch_size: PositiveInt = 32
    """Prompts per round."""

    async_level: Annotated[int, Field(ge=0)] = 0
    """Rounds to sample ahead of training. 0 is strictly on-policy. 1 samples the next round during training. n keeps n
    rounds in flight without a pause (fully asynchronous)."""

    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Drop samples that are older than this many weight versions. Default: drop none."""

    seed: int = 1234
    """Seed of new weights and of training. Responses are seeded by `rollout.seed`. The flag `--seed` sets both."""

    save_interval: PositiveInt | None = None
    """Rounds between checkpoints. Default: save only the last."""

    keep_checkpoints: PositiveInt | None = 2
    """Number of newest checkpoints to keep. null in a file, or `none` on the command line, keeps all."""

    save_best: Annotated[str, Field(min_length=1)] | None = None
    """Metric of an evaluation, such as held_out_accuracy. The round with its best value gets a checkpoint, which
    keep_checkpoints never removes and to which the run's link `best` points. A loss or a share of errors counts as
    better when it is lower."""

    early_stop_patience: PositiveInt | None = None
    """End the run after this many evaluations in a row without a new best value of save_best. Default: run to the
    end."""

    async_save: bool = False
    """Write checkpoints in the background from a copy in host memory (12 bytes per parameter with adamw), while
    training continues. The next checkpoint waits for the previous one."""

    keep_samples: bool | Literal["train"] = False
    """Keep the scored samples of every round, so that any step can be replayed. `train` also keeps the training rows
    token by token (advantages, log-probabilities, ratios), at the cost of one extra forward pass per step."""

    profile: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None = None
    """First and last round to profile. Chrome traces of torch.profiler and snapshots of GPU memory of every training
    process go into the folder profile."""

    grace_s: Annotated[float, Field(ge=0)] = 20.0
    """Seconds to finish the round after SIGTERM or SIGHUP (Slurm and Kubernetes kill after 30 by default). Then the
    round is abandoned, and the state of the previous round is saved. Ctrl-C waits for the round."""

    stall_timeout: Annotated[float, Field(gt=0)] | None = 1800.0
    """Seconds without progress after which the run ends with exit code 124, names the part that is stuck and writes all
    stacks to logs/stall.log. Progress is any sampled token, graded call, training pack, tensor that is pushed, read or
    saved, and CPU time of compilers and agents' programs. A long round is not a stall. Choose more than your own limits
    for single calls (rollout.tool_timeout_s, score.wall_timeout_s). none turns the watch off."""

    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts from the last checkpoint after a training rank dies."""

    max_reward_timeouts: Annotated[float, Field(ge=0, le=1)] | None = 0.25
    """Maximum share of a round's samples whose grading exceeds its time limits (score.timeout_s, score.wall_timeout_s).
    Above it the run stops, because that many timeouts say more about the machine than about the responses. none turns
    the check off."""

    max_logprob_mismatch: Annotated[float, Field(gt=0)] | None = 0.1
    """Maximum mean |trainer - engine| log-probability of a step before on_logprob_mismatch applies. none turns the
    check off. Rounds that older weights wrote in part (run.async_level, over-sampling) legitimately differ. They are
    reported, not checked."""

    on_logprob_mismatch: Literal["warn", "stop"] = "warn"
    """What to do above max_logprob_mismatch."""

    on_no_signal: Literal["warn", "stop"] = "warn"
    """What to do after no_signal_rounds consecutive rounds without a learning signal: all rewards equal, or equal
    within every group. The metric is rollout/no_signal. `stop` saves and exits with code 1."""

    on_finding: Literal["log", "stop"] = "log"
    """What to do when a finding of `slimectl diagnose` begins. `log` prints one line. `stop` also saves and exits with
    code 1 if its severity is error."""

    on_data_change: Literal["warn", "stop"] = "stop"
    """What to do on resume if the data of `rollout.data` has changed since the checkpoint. The run continues at its
    position in the data, so prompts would repeat or be skipped. Changed data of [eval] is always only a warning."""

    no_signal_rounds: PositiveInt = 10
    """Consecutive rounds without a signal before on_no_signal applies."""

    @field_validator("profile")
    @classmethod
    def _order_rounds(cls, rounds: list[int] | None) -> list[int] | None:
        """Reject an interval of rounds that ends before it begins."""
        if rounds is not None and rounds[0] > rounds[1]:
            raise PydanticCustomError("rounds", "must be [first, last] with first <= last")
        return rounds


class SftWarmupSettings(Section):
    """Supervised steps on the labels before the first round, until the model gets some answers right."""

    section_name: ClassVar[str] = "sft_warmup"

    data: Texts = []
    """Prompt sources whose labels are the demonstrations. Empty: no warm-up."""

    target_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Stop when this share of responses to warm-up prompts is right. RL needs some successes to learn from."""

    check_interval: PositiveInt = 10
    """Steps between accuracy checks."""

    max_steps: Annotated[int, Field(ge=0)] = 300
    """Maximum number of steps."""

    batch_size: PositiveInt = 64
    """Demonstrations per step."""

    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Constant learning rate."""


class CustomSettings(Section):
    """Settings of your own functions, under any names: hooks read `args.NAME`. A reward function may have a parameter
    NAME, as with verl's reward_kwargs. No part of slimectl reads them."""

    model_config = ConfigDict(extra="allow")

    def entries(self) -> dict[str, Any]:
        """Return all custom settings by name."""
        return dict(self.__pydantic_extra__ or {})


class TrackSettings(Section):
    """Trackers of metrics, in addition to metrics.jsonl, which is always written.

    ROLL's `track_with` and `tracker_kwargs` and slime's `use_wandb`, `wandb_…`, `use_tensorboard` and `tb_…` mean these
    keys, here and at the top of a settings file.

    API keys are read from the environment (WANDB_API_KEY, SWANLAB_API_KEY, MLFLOW_TRACKING_TOKEN) or from api_key.
    They are never written down. ${SECTION.KEY} in project, entity, group, dir, run_id and kwargs is the value of that
    setting. ROLL's ${exp_name} is ${run.name}.
    """

    section_name: ClassVar[str] = "track"

    with_: Annotated[list[TrackerName], ListOfTexts, Field(alias="with")] = ["stdout"]
    """Trackers: stdout, tensorboard, wandb, swanlab, mlflow, trackio, jsonl, or a tracker of an installed package."""

    kwargs: dict[str, dict[str, Any]] = {}
    """Constructor arguments of trackers (wandb.init, swanlab.init, trackio.init, SummaryWriter), by tracker name. The
    name may be left out if `with` has only one library. swanlab also takes login_kwargs for swanlab.login. mlflow takes
    tracking_uri, experiment_name, run_name and tags."""

    naming: Literal["slime", "roll", "both"] = "slime"
    """Metric names for trackers: slime's, ROLL's or both. metrics.jsonl always has slime's. `slimectl metrics` lists
    both."""

    project: str = "slimectl"
    """Project at wandb, SwanLab and Trackio, and experiment at MLflow."""

    entity: str | None = None
    """Team or user that owns the project (workspace at SwanLab)."""

    group: str | None = None
    """Group name. Runs of a group are shown together."""

    mode: Literal["online", "offline", "disabled", "shared"] | None = None
    """Whether wandb and SwanLab send metrics. Default: their environment variables (WANDB_MODE, SWANLAB_MODE). offline
    and disabled send nothing and need no key. shared is for wandb online only: the trainer's ranks write into the same
    run, each with its own label."""

    dir: str | None = None
    """Folder for tracker files. Default: the run's folder."""

    host: str | None = None
    """Address of a self-hosted wandb server."""

    api_key: Key | None = None
    """Key of an account at wandb or SwanLab, or token of an MLflow server. Default: their environment variables and
    logins. Prefer env:NAME or file:PATH to the key itself. Not used offline. For several trackers with accounts give
    kwargs.NAME.api_key."""

    run_id: str | None = None
    """Run id at the trackers. Default: drawn once and kept in the run's folder, so that a resumed run continues the
    same curves."""

    random_suffix: bool = True
    """Append six random characters to the tracker's run name, so that reused names stay distinct."""

    timeline: bool = True
    """Write timeline.jsonl: what every part of the run did at what time, for `slimectl view`."""

    timeline_requests: Annotated[int, Field(ge=0)] = 64
    """Maximum requests to engines in the timeline per round and per evaluation. They are those of evenly spaced
    samples, with the slowest one. Metrics count all requests."""

    always_use_train_step: bool = False
    """Use the train step as the x-axis of every metric."""

    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of an HTTP endpoint with the last value of every metric in Prometheus' text format, open during `run` or
    `train`. 0 picks a free port, which is logged. Default: no endpoint."""

    prometheus_host: str = "127.0.0.1"
    """Address of the endpoint. The default is this machine only. 0.0.0.0 listens on every network."""

    custom_rollout_log_function_path: str | None = None
    """Path of a function (rollout_id, args, samples, rollout_extra_metrics, rollout_time). If it returns true, trackers
    do not get the metrics of the round's samples."""

    custom_eval_rollout_log_function_path: str | None = None
    """The same for evaluations: (rollout_id, args, data, extra_metrics)."""

    samples: Annotated[int, Field(ge=0)] = 0
    """Number of samples of each evaluation to log as a table (prompt, response, label, reward). The prompts are the
    same every time, with one sample of each first. The terminal always shows two."""

    log_passrate: bool = False
    """Log pass@k of every round."""

    log_multi_turn: bool = False
    """Log turns and lengths of conversations."""

    log_reward_category: str | None = None
    """Key of the metadata or of a prompt's row. Responses are counted and rewards averaged by its values."""

    log_correct_samples: bool = False
    """Log the number and lengths of correct responses."""

    log_memory: bool = False
    """Log the memory of processes and GPUs at the start and end of every phase of a round."""

    measure_peak: bool = False
    """Time matrix products on every rank at the start (half a second), for perf/mfu on devices whose peak is unknown,
    such as CPUs."""

    plot: bool = True
    """Plot the reward curve at the end."""

    @model_validator(mode="before")
    @classmethod
    def _name_the_tracker(cls, values: Any) -> Any:
        """Assign arguments without a tracker name to the only library in `with`, as ROLL does."""
        kwargs = values.get("kwargs") if isinstance(values, dict) else None
        if not isinstance(kwargs, dict) or not kwargs:
            return values
        if any(name in TRACKERS and isinstance(arguments, dict) for name, arguments in kwargs.items()):
            return values
        trackers = values.get("with", values.get("with_", []))
        libraries = {trackers} if isinstance(trackers, str) else {name for name in trackers if name not in OWN_TRACKERS}
        return values | {"kwargs": {libraries.pop(): kwargs}} if len(libraries) == 1 else values

    @field_validator("kwargs")
    @classmethod
    def _refuse_secrets(cls, kwargs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Reject literal secrets in tracker arguments, which are written to run.toml and manifests."""
        for tracker, arguments in kwargs.items():
            for name in secret_names(arguments):
                raise PydanticCustomError(
                    "secret",
                    "{tracker}.{name} is a secret, and settings are written to files. {variable}env:NAME or file:PATH",
                    {"tracker": tracker, "name": name, "variable": _variable_advice(tracker)},
                )
        return kwargs


def _variable_advice(tracker: str) -> str:
    """Return the part of a message that names the environment variable of a tracker's key, or "" if it has none."""
    variable = {**KEY_VARIABLES, "trackio": "HF_TOKEN"}.get(tracker)
    return f"Set {variable} in the environment, or use " if variable else "Use "


def secret_names(arguments: dict[str, Any]) -> list[str]:
    """Return the names of literal secrets in `arguments` and its nested tables."""
    direct = [
        name
        for name, value in arguments.items()
        if name.lower().rpartition("_")[2] in SECRETS and not is_reference(value)
    ]
    nested = [name for value in arguments.values() if isinstance(value, dict) for name in secret_names(value)]
    return direct + nested
