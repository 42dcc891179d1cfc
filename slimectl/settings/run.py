"""Settings of the run loop, its supervised warm-up (SFT) and its trackers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from slimectl.redaction import is_reference
from slimectl.registry import TRACKERS
from slimectl.settings.base import ListOfTexts, PositiveInt, Section, Texts, registered_in
from slimectl.settings.secret import Key

TrackerName = Annotated[str, *registered_in(TRACKERS)]
OWN_TRACKERS = ("stdout", "jsonl")
"""Trackers without a library."""
KEY_VARIABLES = {"wandb": "WANDB_API_KEY", "swanlab": "SWANLAB_API_KEY", "mlflow": "MLFLOW_TRACKING_TOKEN"}
"""Trackers with an account, and the environment variable of its key."""
SECRETS = ("key", "token", "password", "secret")
"""Last words of an argument's name that mark it as a secret."""


class RunSettings(Section):
    """Rounds of rollout, score and train, and their checkpoints."""

    section_name: ClassVar[str] = "run"

    name: str | None = None
    """Folder of the run under run.dir; the recipe's name where not given."""

    dir: str = "runs"
    """Folder of all runs."""

    num_rollout: PositiveInt | None = None
    """Rounds to run."""

    num_epoch: PositiveInt | None = None
    """Passes over the prompts, instead of num_rollout."""

    rollout_batch_size: PositiveInt = 32
    """Prompts per round."""

    async_level: Annotated[int, Field(ge=0)] = 0
    """Rounds that may be sampled before their turn; 0 is strictly on-policy, 1 samples the next round while this one is
    trained on, n keeps n rounds under way without a pause between them (fully asynchronous)."""

    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Drop samples older than this many weight versions; none are dropped where not given."""

    seed: int = 1234
    """Seed of new weights and of training."""

    save_interval: PositiveInt | None = None
    """Rounds between checkpoints; only the last is saved where not given."""

    keep_checkpoints: PositiveInt | None = 2
    """Newest checkpoints to keep; all with null in a file or `none` on the command line."""

    save_best: Annotated[str, Field(min_length=1)] | None = None
    """Metric of an evaluation, such as held_out_accuracy. The round with its best value gets a checkpoint, which
    keep_checkpoints never removes and to which the run's link `best` points. A loss or a share of errors counts as
    better when it is lower."""

    early_stop_patience: PositiveInt | None = None
    """End the run after this many evaluations in a row without a new best value of save_best. Default: run to the
    end."""

    keep_samples: bool | Literal["train"] = False
    """Keep the scored samples of every round, so that any step can be replayed; `train` also keeps what was trained on,
    token by token (advantages, log-probabilities, ratios), for a forward pass more a step."""

    profile: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None = None
    """First and last round to profile: torch.profiler's Chrome traces, and snapshots of GPU memory, of every process
    that trains go into the folder profile."""

    grace_s: Annotated[float, Field(ge=0)] = 20.0
    """Seconds that the round gets to end after SIGTERM or SIGHUP (Slurm and Kubernetes kill after 30 by default); then
    it is abandoned, and the state after the round before it is saved. Ctrl-C waits for the round."""

    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a run goes on from its last checkpoint after a trainer's rank died."""

    max_reward_timeouts: Annotated[float, Field(ge=0, le=1)] | None = 0.25
    """Share of a round's samples whose grading may exceed its time limits (score.timeout_s, score.wall_timeout_s); past
    it the run stops, because so many rewards of 0 tell more of the machine than of the answers. none never stops."""

    max_logprob_mismatch: Annotated[float, Field(gt=0)] | None = 0.1
    """Mean |trainer - engine| log-probability of a step above which something is wrong; none does not look. Rounds that
    older weights wrote in part (run.async_level, over-sampling) differ by right: they are reported and not judged."""

    on_logprob_mismatch: Literal["warn", "stop"] = "warn"
    """What to do above it."""

    on_no_signal: Literal["warn", "stop"] = "warn"
    """What to do after no_signal_rounds rounds in a row whose rewards teach nothing: all equal, or equal within every
    group. Each such round has the metric rollout/no_signal. `stop` saves and ends with exit code 1."""

    no_signal_rounds: PositiveInt = 10
    """Rounds without signal in a row after which on_no_signal acts."""

    @field_validator("profile")
    @classmethod
    def _order_rounds(cls, rounds: list[int] | None) -> list[int] | None:
        """Reject an interval of rounds that ends before it begins."""
        if rounds is not None and rounds[0] > rounds[1]:
            raise PydanticCustomError("rounds", "give [first, last], the first round not after the last")
        return rounds


class SftWarmupSettings(Section):
    """Supervised steps on the labels before the first round, until the model gets some answers right."""

    section_name: ClassVar[str] = "sft_warmup"

    data: Texts = []
    """Prompt sources whose labels are the demonstrations; no warm-up where empty."""

    target_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Stop when this share of answers to warm-up prompts is right: RL needs some successes to learn from."""

    check_interval: PositiveInt = 10
    """Steps between two looks at the accuracy."""

    max_steps: Annotated[int, Field(ge=0)] = 300
    """Stop here in any case."""

    batch_size: PositiveInt = 64
    """Demonstrations per step."""

    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Learning rate, constant."""


class CustomSettings(Section):
    """Settings of your own functions, under any names: hooks read `args.NAME`. No part of slimectl reads them."""

    model_config = ConfigDict(extra="allow")

    def entries(self) -> dict[str, Any]:
        """All of them by name."""
        return dict(self.__pydantic_extra__ or {})


class TrackSettings(Section):
    """Trackers of metrics besides metrics.jsonl, which is always written.

    ROLL's `track_with` and `tracker_kwargs` and slime's `use_wandb`, `wandb_…`, `use_tensorboard` and `tb_…` mean these
    keys, here and at the top of a settings file.

    API keys are read from the environment (WANDB_API_KEY, SWANLAB_API_KEY, MLFLOW_TRACKING_TOKEN) or from api_key.
    They are never written down. ${SECTION.KEY} in project, entity, group, dir, run_id and kwargs is the value of that
    setting. ROLL's ${exp_name} is ${run.name}.
    """

    section_name: ClassVar[str] = "track"

    with_: Annotated[list[TrackerName], ListOfTexts, Field(alias="with")] = ["stdout"]
    """Trackers: stdout, tensorboard, wandb, swanlab, mlflow, trackio, jsonl, and those of installed packages."""

    kwargs: dict[str, dict[str, Any]] = {}
    """Arguments for a tracker's own constructor (wandb.init, swanlab.init, trackio.init, SummaryWriter), by its name;
    without it where `with` has one library alone. swanlab also takes login_kwargs, for swanlab.login; mlflow takes
    tracking_uri, experiment_name, run_name and tags."""

    naming: Literal["slime", "roll", "both"] = "slime"
    """Whose names trackers get; metrics.jsonl has slime's. `slimectl metrics` lists both."""

    project: str = "slimectl"
    """Project at wandb, SwanLab and Trackio, experiment at MLflow."""

    entity: str | None = None
    """Team or user whose project it is (workspace at SwanLab)."""

    group: str | None = None
    """Runs of one group are shown together."""

    mode: Literal["online", "offline", "disabled", "shared"] | None = None
    """Whether wandb and SwanLab send metrics. Default: their environment variables (WANDB_MODE, SWANLAB_MODE). offline
    and disabled send nothing and need no key. shared works with wandb online only: the trainer's ranks write into the
    same run, each under its own label."""

    dir: str | None = None
    """Folder where they write; the run's own where not given."""

    host: str | None = None
    """Address of a wandb server of one's own."""

    api_key: Key | None = None
    """Key of an account at wandb or SwanLab, or token of an MLflow server. Default: their environment variables and
    logins. Prefer env:NAME or file:PATH to the key itself. Not used offline. For several trackers with accounts give
    kwargs.NAME.api_key."""

    run_id: str | None = None
    """Id under which they know the run; drawn once and kept in the run's folder where not given, so that a resumed run
    goes on in the same curves."""

    random_suffix: bool = True
    """Put six random characters behind the run's name there: a name is used more than once."""

    always_use_train_step: bool = False
    """Put every metric on the axis of train steps."""

    prometheus_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of an HTTP endpoint with the last value of every metric in the text format of Prometheus, open as long as
    `run` or `train` goes on; 0 is any free port, which a message names. No endpoint where not given."""

    prometheus_host: str = "127.0.0.1"
    """Address at which the endpoint listens: this machine's own by default, 0.0.0.0 for every network."""

    custom_rollout_log_function_path: str | None = None
    """Function of (rollout_id, args, samples, rollout_extra_metrics, rollout_time), by path: true keeps the metrics of
    a round's samples from trackers."""

    custom_eval_rollout_log_function_path: str | None = None
    """The same for evaluations: (rollout_id, args, data, extra_metrics)."""

    samples: Annotated[int, Field(ge=0)] = 0
    """Samples of each evaluation of which trackers get a table: prompt, response, label, reward; one to each prompt
    before a second to any, the same prompts every time. The terminal shows two in any case."""

    log_passrate: bool = False
    """Pass@k of every round."""

    log_multi_turn: bool = False
    """Turns and lengths of conversations."""

    log_reward_category: str | None = None
    """Key of the metadata or of a prompt's row by whose values answers are counted, and their rewards averaged."""

    log_correct_samples: bool = False
    """Number and lengths of right answers."""

    log_memory: bool = False
    """Memory of the processes of every phase of a round, when it begins and ends, by GPU."""

    measure_peak: bool = False
    """Time products of matrices on every rank when a run starts (half a second), for perf/mfu on devices whose peak is
    not known, such as CPUs."""

    plot: bool = True
    """Draw the reward curve at the end."""

    @model_validator(mode="before")
    @classmethod
    def _name_the_tracker(cls, values: Any) -> Any:
        """Put arguments that name no tracker under the only library's in `with`, as ROLL's files mean them."""
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
                    "{tracker}.{name} does not belong in settings, which are written down; {variable}give env:NAME or "
                    "file:PATH",
                    {"tracker": tracker, "name": name, "variable": _variable_advice(tracker)},
                )
        return kwargs


def _variable_advice(tracker: str) -> str:
    """Return the part of a message that names the environment variable of a tracker's key; "" if it has none."""
    variable = {**KEY_VARIABLES, "trackio": "HF_TOKEN"}.get(tracker)
    return f"set {variable} in the environment, or " if variable else ""


def secret_names(arguments: dict[str, Any]) -> list[str]:
    """Names of literal secrets in `arguments` and its nested tables."""
    direct = [
        name
        for name, value in arguments.items()
        if name.lower().rpartition("_")[2] in SECRETS and not is_reference(value)
    ]
    nested = [name for value in arguments.values() if isinstance(value, dict) for name in secret_names(value)]
    return direct + nested
