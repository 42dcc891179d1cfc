"""Settings of the job that `slimectl launch` writes for a scheduler."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from slimectl.settings.base import PositiveInt, Section, Texts

TIME_LIMIT = re.compile(r"(?:(\d+)-)?(\d{1,2}):([0-5]\d):([0-5]\d)")


def _one_word(text: str) -> str:
    if len(text.split()) > 1:
        raise PydanticCustomError("word", "must not contain blanks")
    return text


Word = Annotated[str, AfterValidator(_one_word)]


class LaunchSettings(Section):
    """The job of `slimectl launch`: limits, queue, image and set-up. The number of machines and GPUs follows from
    [cluster]."""

    section_name: ClassVar[str] = "launch"

    setup: Texts = []
    """Shell lines to run on every machine before slimectl, e.g. ["module load cuda", ". .venv/bin/activate"]. The job
    ends if one fails."""

    time_limit: str = "24:00:00"
    """Time limit of a Slurm job: [DAYS-]HH:MM:SS."""

    term_s: PositiveInt = 120
    """Seconds before the time limit at which a Slurm job gets SIGTERM, saves and requeues itself. Kubernetes waits as
    long before it kills a pod. It must be above run.grace_s, because saving comes on top."""

    requeues: Annotated[int, Field(ge=0)] = 20
    """Maximum number of times that the job starts again after its time limit, a preemption or a lost machine."""

    partition: Word | None = None
    """Slurm partition, or the Kueue queue of a Kubernetes job."""

    account: Word | None = None
    """Slurm account to charge."""

    cpus_per_node: PositiveInt | None = None
    """CPU cores to ask for on every machine. Default: what the scheduler gives."""

    memory_gib_per_node: PositiveInt | None = None
    """Host memory in GiB to ask for on every machine. Default: what the scheduler gives."""

    gpu_type: Word | None = None
    """Kind of GPU: for Slurm and SkyPilot a type such as h100 or H100, for Kubernetes the value of the node label
    nvidia.com/gpu.product."""

    gpu_memory_gib: Annotated[float, Field(gt=0)] = 80.0
    """Memory of a GPU in GiB. `slimectl launch` refuses a run that needs more by `slimectl plan`."""

    options: Texts = []
    """Further #SBATCH options, e.g. ["--exclusive", "--constraint=nvlink"]."""

    image: Word | None = None
    """Container image for Kubernetes (required) and SkyPilot."""

    namespace: Word = "default"
    """Kubernetes namespace."""

    claim: Word | None = None
    """Storage of the runs. Kubernetes: a PersistentVolumeClaim that every pod can mount (ReadWriteMany), with the
    project and its data. SkyPilot: a bucket such as s3://NAME."""

    folder: str = "/workspace"
    """Folder at which the claim is mounted. In Kubernetes slimectl starts there."""

    env: Texts = []
    """Environment variables with secrets that the job needs, e.g. ["HF_TOKEN", "WANDB_API_KEY"]. Their values are never
    written. Kubernetes takes them from the Secret launch.env_from, SkyPilot from the environment of --submit."""

    env_from: Word = "slimectl"
    """Kubernetes Secret with a key for each variable of launch.env."""

    pod: dict[str, Any] = {}
    """Fields of every Kubernetes pod's spec, which replace those of the job, e.g. {serviceAccountName = "trainer",
    hostNetwork = true}."""

    @field_validator("env")
    @classmethod
    def _check_env(cls, names: list[str]) -> list[str]:
        if not all(name.isidentifier() for name in names):
            raise PydanticCustomError("env", "list names of variables, without their values")
        return names

    @field_validator("pod")
    @classmethod
    def _check_pod(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Reject the parts of a pod without which the job cannot run."""
        if own := fields.keys() & {"containers", "volumes"}:
            raise PydanticCustomError("pod", "{part} of the pod are the job's own", {"part": min(own)})
        return fields

    @field_validator("time_limit")
    @classmethod
    def _check_time_limit(cls, text: str) -> str:
        """Reject a limit in another form. Without quotes, YAML reads 24:00:00 as a number of seconds."""
        if not TIME_LIMIT.fullmatch(text):
            raise PydanticCustomError("time_limit", "write it as [DAYS-]HH:MM:SS, in quotes in a file")
        return text

    @property
    def time_limit_s(self) -> int:
        match = TIME_LIMIT.fullmatch(self.time_limit)
        assert match is not None
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
