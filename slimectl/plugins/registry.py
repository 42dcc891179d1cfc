"""Registries of engines, policies, trackers, verifiers, environments and executors, extensible by entry points."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from slimectl.errors import BackendError


class Component:
    """A part of slimectl: the import path of its class or function, and facts available without importing it."""

    def __init__(self, target: str, **facts: Any) -> None:
        self.target = target
        self.facts = facts

    def load(self) -> Any:
        module, _, name = self.target.partition(":")
        return getattr(import_module(module), name)


class Registry:
    """All parts of one kind by name. An import happens when one is loaded.

    Packages add parts by entry points in the group of the kind. They cannot replace slimectl's own names.

    >>> codecs = Registry("codec", "slimectl.codecs", {"json": Component("json:dumps", binary=False)})
    >>> codecs.load("json")([1]), codecs.fact("json", "binary"), "jsno" in codecs
    ('[1]', False, False)
    >>> codecs.unknown("jsno")
    "no codec 'jsno'. Did you mean json? Available: json"
    """

    def __init__(self, kind: str, group: str, parts: Mapping[str, Component]) -> None:
        self.kind = kind
        self.group = group
        self.parts = parts

    def __contains__(self, name: str) -> bool:
        return name in self.parts or self.is_third_party(name)

    def is_third_party(self, name: str) -> bool:
        """Whether the part comes from another package."""
        return name not in self.parts and name in _third_party(self.group)

    def names(self) -> list[str]:
        """Every name, sorted."""
        return sorted(self.parts.keys() | _third_party(self.group).keys())

    def unknown(self, name: str, *, spelling: str | None = None) -> str:
        """Return the message for an unknown name, with the most similar name and all names.

        The message quotes `spelling` instead, if the name is only part of what the user wrote.
        """
        near = get_close_matches(name, self.names(), n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        return f"no {self.kind} {(spelling or name)!r}. {hint}Available: {', '.join(self.names())}"

    def load(self, name: str) -> Any:
        """Import a part. Raises BackendError, with the package's name, if another package's cannot be imported."""
        if name in self.parts:
            return self.parts[name].load()
        entries = _third_party(self.group).get(name, ())
        if not entries:
            raise BackendError(self.unknown(name))
        if len(entries) > 1:
            packages = " and ".join(_package(entry) for entry in entries)
            raise BackendError(f"{self.kind} {name}: defined by both {packages}. Uninstall all but one of them.")
        try:
            return entries[0].load()
        except Exception as error:  # a third-party module may raise anything
            raise BackendError(
                f"{_package(entries[0])}: its {self.kind} {name} ({entries[0].value}) cannot be imported: "
                f"{type(error).__name__}: {_one_line(error)}. Fix or uninstall that package."
            ) from error

    def fact(self, name: str, key: str, default: Any = None) -> Any:
        """Return an attribute of a part: from the registry, or for a third-party part, from the loaded object."""
        if name in self.parts:
            return self.parts[name].facts.get(key, default)
        return getattr(self.load(name), key, default)

    def package(self, name: str) -> str:
        """Return name and version of the package that a part comes from."""
        entries = _third_party(self.group).get(name) if name not in self.parts else None
        return _package(entries[0]) if entries else "slimectl"


def _third_party(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    return _scan(group, tuple(sys.path))


@lru_cache(maxsize=32)
def _scan(group: str, path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """Read the entry points of every package on `path`: a tenth of a second for a hundred packages."""
    parts: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=group):
        parts[entry.name] = (*parts.get(entry.name, ()), entry)
    return parts


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


ENGINES = Registry(
    "engine",
    "slimectl.engines",
    {
        "auto": Component("slimectl.runtime.builders.engines:AutoBackend", in_process=True),
        "embedded": Component("slimectl.runtime.builders.engines:EmbeddedBackend", in_process=True),
        "transformers": Component("slimectl.runtime.builders.engines:TransformersBackend", in_process=True),
        "sglang": Component(
            "slimectl.runtime.builders.installed_engines:SglangBackend", in_process=False, spans_machines=True
        ),
        "vllm": Component(
            "slimectl.runtime.builders.installed_engines:VllmBackend", in_process=False, takes_router=False
        ),
    },
)
POLICIES = Registry(
    "policy",
    "slimectl.policies",
    {
        "fsdp": Component("slimectl.runtime.builders.trainers:FsdpBackend"),
        "megatron": Component("slimectl.runtime.builders.trainers:MegatronBackend"),
    },
)
EXECUTORS = Registry(
    "executor",
    "slimectl.executors",
    {
        "local": Component("slimectl.runtime.builders.executors:LocalBackend"),
        "ray": Component("slimectl.runtime.builders.executors:RayBackend"),
    },
)
ENVIRONMENTS = Registry(
    "environment",
    "slimectl.environments",
    {
        "gymnasium": Component("slimectl.agents.environments.gymnasium:Gymnasium"),
        "harbor": Component("slimectl.agents.environments.harbor:Harbor", library=None),
        "mcp": Component("slimectl.agents.environments.mcp:Mcp"),
        "openenv": Component("slimectl.agents.environments.openenv:OpenEnv", library=None),
        "python": Component("slimectl.agents.environments.user:user_environment", library=None),
        "reasoning_gym": Component(
            "slimectl.agents.environments.reasoning_gym:ReasoningGymTasks", package="reasoning-gym", extra="quickstart"
        ),
        "textarena": Component("slimectl.agents.environments.textarena:TextArena"),
        "verifiers": Component("slimectl.agents.environments.verifiers:Verifiers"),
    },
)
TRACKERS = Registry(
    "tracker",
    "slimectl.trackers",
    {
        "jsonl": Component("slimectl.trackers.jsonl:JsonlTracker"),
        "mlflow": Component("slimectl.trackers.mlflow:MlflowTracker", library="mlflow", files=r"mlflow/.+"),
        "stdout": Component("slimectl.trackers.stdout:console_tracker", renames=True),
        "swanlab": Component(
            "slimectl.trackers.swanlab:SwanlabTracker", library="swanlab", files=r"swanlab/(run-[^/]+/.+|\.gitignore)"
        ),
        "tensorboard": Component(
            "slimectl.trackers.tensorboard:TensorboardTracker",
            library="tensorboard",
            files=r"tensorboard/events\.out\.tfevents\.[^/]+",
        ),
        "trackio": Component("slimectl.trackers.trackio:TrackioTracker", library="trackio"),
        "wandb": Component(
            "slimectl.trackers.wandb:WandbTracker",
            library="wandb",
            files=r"wandb/((rank-[^/]+/wandb/)?(offline-)?run-[^/]+/.+|(rank-[^/]+/wandb/)?debug[^/]*\.log|(rank-[^/]+/wandb/)?latest-run)",
        ),
    },
)
VERIFIERS = Registry(
    "verifier",
    "slimectl.verifiers",
    {
        "by_column": Component("slimectl.rewards.by_column:ByColumn"),
        "code": Component("slimectl.rewards.code:Code"),
        "contains": Component("slimectl.rewards.text:Contains"),
        "dapo": Component("slimectl.rewards.math.dapo:Dapo"),
        "deepscaler": Component("slimectl.rewards.math.verifier:Deepscaler"),
        "exact": Component("slimectl.rewards.text:Exact"),
        "f1": Component("slimectl.rewards.text:F1"),
        "gpqa": Component("slimectl.rewards.gpqa:Gpqa"),
        "ifbench": Component("slimectl.rewards.instruction_following.ifbench:IfBench"),
        "ifeval": Component("slimectl.rewards.instruction_following.ifeval:IfEval"),
        "judge": Component("slimectl.rewards.judge:Judge"),
        "length_penalty": Component("slimectl.rewards.shaping:LengthPenalty"),
        "math": Component("slimectl.rewards.math.verifier:Math"),
        "numeric": Component("slimectl.rewards.text:Numeric"),
        "overlong": Component("slimectl.rewards.shaping:Overlong"),
        "random": Component("slimectl.rewards.shaping:Random"),
        "reasoning_gym": Component("slimectl.rewards.reasoning_gym:ReasoningGym"),
        "regex": Component("slimectl.rewards.text:Regex"),
        "remote_rm": Component("slimectl.rewards.remote:RemoteRm"),
        "repetition": Component("slimectl.rewards.shaping:Repetition"),
        "reward_model": Component("slimectl.rewards.reward_model:RewardModel"),
        "rubric": Component("slimectl.rewards.rubric:Rubric"),
    },
)

__all__ = ["ENGINES", "ENVIRONMENTS", "EXECUTORS", "POLICIES", "TRACKERS", "VERIFIERS", "Component", "Registry"]
