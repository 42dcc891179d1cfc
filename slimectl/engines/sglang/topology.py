"""The SGLang servers of a run: uniform, prefill and decode, or groups with separate models."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slimectl.engines.sglang.disaggregation import ROLES
from slimectl.errors import SettingsError
from slimectl.settings.cluster import nodes_of


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The specification of one server to start.

    >>> ServerSpec(name="prefill-0", model=Path("m"), role="prefill").router_kind()
    {'worker_type': 'prefill'}
    """

    name: str
    model: Path
    gpus: int = 1
    """GPUs of the server: tensor-parallel ranks times pipeline stages."""

    tensor_parallel: int = 1
    role: str = "regular"
    nodes: int = 1
    """Number of machines, each with an equal share of the GPUs."""

    node: int = 0
    """Index of the machine that this part runs on."""

    gets_weights: bool = True
    """Whether trained weights are pushed to the server. A judge or a teacher keeps its own."""

    args: Mapping[str, Any] = field(default_factory=dict)

    def router_kind(self) -> dict[str, Any]:
        """Return the options for registration with the router, except for the address."""
        return {} if self.role == "regular" else {"worker_type": self.role}

    def parts(self) -> list[ServerSpec]:
        """Return one part per machine. The first one has the server's name."""
        return [
            replace(self, node=node, name=f"{self.name}-node-{node}" if node else self.name)
            for node in range(self.nodes)
        ]


PIPELINE_KEYS = ("pp_size", "pipeline_parallel_size")
"""Arguments of SGLang and vLLM that set the number of pipeline stages."""

GROUP_KEYS = {"name", "model", "num_engines", "num_gpus_per_engine", "role", "args"}


def groups_of(
    model: Path,
    *,
    num_engines: int,
    gpus_per_engine: int,
    prefill_num_servers: int = 0,
    server_groups: Sequence[Mapping[str, Any]] = (),
    args: Mapping[str, Any] | None = None,
    gpus_per_node: int | None = None,
) -> list[ServerSpec]:
    """Return the spec of every server, prefill servers first.

    `args` apply to all servers, but the args of a group take precedence. A server with a multiple of `gpus_per_node`
    GPUs spans several machines. Raises SettingsError for an unknown key of a group, and for prefill without decode or
    decode without prefill.
    """
    configs = list(server_groups) or _default_groups(num_engines, prefill_num_servers)
    specs = [spec for group in configs for spec in _specs_of(group, model, gpus_per_engine, args or {}, gpus_per_node)]
    specs.sort(key=lambda spec: spec.role != "prefill")
    roles = {spec.role for spec in specs if spec.gets_weights}
    if not roles:
        raise SettingsError(
            "sglang.server_groups: no group serves the trained model. Leave `model` out of one of them."
        )
    if roles not in ({"regular"}, {"prefill", "decode"}):
        raise SettingsError(
            f"sglang.server_groups: {' and '.join(sorted(roles))} servers cannot work alone. "
            f"Use both prefill and decode, or neither."
        )
    return specs


def _default_groups(num_engines: int, prefill: int) -> list[Mapping[str, Any]]:
    if not prefill:
        return [{"name": "engine", "num_engines": num_engines}]
    if prefill >= num_engines:
        raise SettingsError(
            f"sglang.prefill_num_servers: {prefill} of {num_engines} engines prefill, so none is left to decode. "
            f"Raise engine.num_engines."
        )
    return [
        {"name": "prefill", "role": "prefill", "num_engines": prefill},
        {"name": "decode", "role": "decode", "num_engines": num_engines - prefill},
    ]


def _specs_of(
    group: Mapping[str, Any], model: Path, gpus_per_engine: int, args: Mapping[str, Any], gpus_per_node: int | None
) -> Iterator[ServerSpec]:
    for key in group.keys() - GROUP_KEYS:
        near = difflib.get_close_matches(key, GROUP_KEYS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Known keys: {', '.join(sorted(GROUP_KEYS))}"
        raise SettingsError(f"sglang.server_groups: {key}: unknown key. {hint}")
    name, role = str(group.get("name", "engine")), group.get("role", "regular")
    if role not in ROLES:
        raise SettingsError(f"sglang.server_groups: {name}: role {role!r} is not one of {', '.join(ROLES)}")
    group_model = Path(group["model"]) if group.get("model") else model
    gpus = _count(group, name, "num_gpus_per_engine", gpus_per_engine)
    server_args = {**args, **(group.get("args") or {})}
    for i in range(_count(group, name, "num_engines", 1)):
        yield ServerSpec(
            name=f"{name}-{i}",
            model=group_model,
            gpus=gpus,
            tensor_parallel=_stage_ranks(gpus, server_args, name),
            nodes=1 if gpus_per_node is None else nodes_of(gpus, gpus_per_node),
            role=role,
            gets_weights=group_model == model,
            args=server_args,
        )


def _stage_ranks(gpus: int, args: Mapping[str, Any], name: str) -> int:
    """Return the GPUs per pipeline stage. Raises SettingsError if the number of stages does not divide `gpus`."""
    key, stages = next(((key, args[key]) for key in PIPELINE_KEYS if args.get(key) is not None), ("", 1))
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1 or gpus % stages:
        raise SettingsError(
            f"{key}: {stages!r} pipeline stages do not divide the {gpus} GPUs of {name}. "
            f"cluster.rollout_num_gpus_per_engine counts the GPUs of all stages."
        )
    return gpus // stages


def _count(group: Mapping[str, Any], name: str, key: str, default: int) -> int:
    value = group.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingsError(f"sglang.server_groups: {name}: {key}: {value!r} is not a number of at least 1")
    return value
