"""Settings of the run loop, its supervised warm-up (SFT) and its trackers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from slimectl.registry import TRACKERS
from slimectl.settings.base import PositiveInt, Section, Texts
from slimectl.settings.parts import registered_in

TrackerName = Annotated[str, *registered_in(TRACKERS)]
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

    keep_samples: bool = False
    """Keep the scored samples of every round, so that any step can be replayed."""

    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often a run goes on from its last checkpoint after a trainer's rank died."""

    max_logprob_mismatch: Annotated[float, Field(gt=0)] | None = 0.1
    """Mean |trainer - engine| log-probability of a step above which something is wrong; none does not look. Rounds that
    older weights wrote in part (run.async_level, over-sampling) differ by right: they are reported and not judged."""

    on_logprob_mismatch: Literal["warn", "stop"] = "warn"
    """What to do above it."""


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


class TrackSettings(Section):
    """Trackers of metrics besides metrics.jsonl, which is always written.

    API keys are read from the environment (WANDB_API_KEY, SWANLAB_API_KEY) and never written down.
    """

    with_: Annotated[list[TrackerName], Field(alias="with")] = ["stdout"]
    """Trackers: stdout, tensorboard, wandb, swanlab, jsonl, and those of installed packages."""

    kwargs: dict[str, dict[str, Any]] = {}
    """Arguments for a tracker's own constructor (wandb.init, swanlab.init, SummaryWriter), by its name."""

    naming: Literal["slime", "roll", "both"] = "slime"
    """Whose names trackers get; metrics.jsonl has slime's. `slimectl metrics` lists both."""

    project: str = "slimectl"
    """Project at wandb and SwanLab."""

    entity: str | None = None
    """Team or user whose project it is (workspace at SwanLab)."""

    group: str | None = None
    """Runs of one group are shown together."""

    mode: Literal["online", "offline", "disabled"] | None = None
    """Whether wandb and SwanLab send what they get; as their environment variables say (WANDB_MODE) where not given."""

    dir: str | None = None
    """Folder where they write; the run's own where not given."""

    host: str | None = None
    """Address of a wandb server of one's own."""

    run_id: str | None = None
    """Id under which they know the run; drawn once and kept in the run's folder where not given, so that a resumed run
    goes on in the same curves."""

    random_suffix: bool = True
    """Put six random characters behind the run's name there: a name is used more than once."""

    always_use_train_step: bool = False
    """Put every metric on the axis of train steps."""

    custom_rollout_log_function_path: str | None = None
    """Function of (rollout_id, args, samples, rollout_extra_metrics, rollout_time), by path: true keeps the metrics of
    a round's samples from trackers."""

    custom_eval_rollout_log_function_path: str | None = None
    """The same for evaluations: (rollout_id, args, data, extra_metrics)."""

    eval_table_rows: Annotated[int, Field(ge=0)] = 8
    """Prompts of each evaluation of which trackers get a table: prompt, answer, label, reward."""

    log_passrate: bool = False
    """Pass@k of every round."""

    log_multi_turn: bool = False
    """Turns and lengths of conversations."""

    log_reward_category: str | None = None
    """Metadata key by whose values answers are counted, and their rewards averaged."""

    log_correct_samples: bool = False
    """Number and lengths of right answers."""

    plot: bool = True
    """Draw the reward curve at the end."""

    @field_validator("kwargs")
    @classmethod
    def _refuse_secrets(cls, kwargs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Reject secrets in tracker arguments, which are written to run.toml and manifests."""
        for tracker, arguments in kwargs.items():
            for name in secret_names(arguments):
                raise PydanticCustomError(
                    "secret",
                    "{tracker}.{name} does not belong in settings, which are written down; set {variable} in the "
                    "environment",
                    {"tracker": tracker, "name": name, "variable": f"{tracker.upper()}_API_KEY"},
                )
        return kwargs


def secret_names(arguments: dict[str, Any]) -> list[str]:
    """Names of secrets in `arguments` and its nested tables."""
    direct = [name for name in arguments if name.lower().rpartition("_")[2] in SECRETS]
    nested = [name for value in arguments.values() if isinstance(value, dict) for name in secret_names(value)]
    return direct + nested
