"""Checks of the network and of environment variables that break runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from slimectl.data.hugging_face import fetch_command, hub_name, snapshot
from slimectl.runtime.check_result import CheckResult, failure, passed, warning
from slimectl.runtime.doctor.scope import Scope

SLOW_SWITCHES = {
    "NCCL_P2P_DISABLE": "NCCL copies through host memory instead of NVLink",
    "NCCL_SHM_DISABLE": "NCCL sends between processes of this machine over the network",
    "NCCL_IB_DISABLE": "NCCL uses sockets instead of InfiniBand",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before it",
}
"""Variables for debugging, with their effect if set to 1."""
OWN_LIBRARIES = ("libnccl.so*", "libcudart.so*", "libcublas.so*", "libcudnn.so*")
"""CUDA libraries that come with torch. The loader prefers those in LD_LIBRARY_PATH."""


def network(scope: Scope) -> Iterator[CheckResult]:
    """Check the interfaces that NCCL and gloo are told to use, InfiniBand ports, and the address of the host's name."""
    findings = [*_interfaces(scope), *_infiniband(scope), *_host_name(scope)]
    yield from findings
    if not findings:
        active = ", ".join(sorted(name for name in _names(scope, "net") if _is_up(scope, name))) or "none"
        ports = _names(scope, "infiniband")
        yield passed("network", active + (f"; InfiniBand {', '.join(sorted(ports))}" if ports else ""))


def _names(scope: Scope, kind: str) -> set[str]:
    folder = scope.root / "sys/class" / kind
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _is_up(scope: Scope, interface: str) -> bool:
    """Return whether an interface is not down. The loopback's state is unknown."""
    return scope.read(f"sys/class/net/{interface}/operstate") != "down"


def _interfaces(scope: Scope) -> Iterator[CheckResult]:
    existing = _names(scope, "net")
    usable = {name for name in existing if _is_up(scope, name)}
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        if value and existing and not selected(value, usable, is_nccl=variable.startswith("NCCL")):
            listed = ", ".join(sorted(usable))
            state = "is down" if selected(value, existing, is_nccl=variable.startswith("NCCL")) else "does not exist"
            yield failure("network", f"{variable}={value} {state}", f"Set it to one of {listed}, or unset it")
    if (value := os.environ.get("NCCL_IB_HCA", "")) and (cards := _names(scope, "infiniband")):
        ports = ",".join(entry.split(":")[0] for entry in value.split(","))
        if not selected(ports, cards, is_nccl=True):
            text = f"NCCL_IB_HCA={value} matches no InfiniBand card"
            yield failure("network", text, f"Set it to one of {', '.join(sorted(cards))}, or unset it")


def selected(value: str, names: Iterable[str], *, is_nccl: bool) -> set[str]:
    """Return the names that a list selects. NCCL's are prefixes, `=` makes them exact, and `^` excludes.

    >>> sorted(selected("^docker,lo", ["docker0", "eth0", "lo"], is_nccl=True))
    ['eth0']
    """
    excludes = is_nccl and value.startswith("^")
    value = value.removeprefix("^") if excludes else value
    exact = not is_nccl or value.startswith("=")
    entries = tuple(value.removeprefix("=").split(",") if is_nccl else value.split(","))
    return {name for name in names if (name in entries if exact else name.startswith(entries)) != excludes}


def _infiniband(scope: Scope) -> Iterator[CheckResult]:
    for card in sorted(_names(scope, "infiniband")):
        folder = scope.root / "sys/class/infiniband" / card / "ports"
        states = [scope.read(f"{port}/state") for port in sorted(folder.iterdir())] if folder.is_dir() else []
        if states and not any("ACTIVE" in state for state in states):
            remedy = "Check the cable and the subnet manager with `ibstat`, or leave the card out with NCCL_IB_HCA=^"
            yield warning("network", f"InfiniBand {card}: no active port ({states[0]})", f"{remedy}{card}")


def _host_name(scope: Scope) -> Iterator[CheckResult]:
    """Yield a failure if other machines could not reach this one by the address of its name."""
    if scope.placement.nodes == 1:
        return
    name, address = socket.gethostname(), ""
    with suppress(OSError):
        address = socket.gethostbyname(name)
    if not address or address.startswith("127."):
        text = f"{name} resolves to {address}" if address else f"{name} has no address"
        remedy = "Give it this machine's address in /etc/hosts, or set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        if not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= os.environ.keys():
            yield warning("network", f"{text}, which other machines cannot reach", remedy)


def variables(scope: Scope) -> Iterator[CheckResult]:
    """Check variables that slow down or break a run."""
    findings = [*_switches(scope), *_libraries(), *_proxies(scope), *_offline(scope)]
    yield from findings
    if not findings:
        yield passed("variables", "none that breaks a run")


def _switches(scope: Scope) -> Iterator[CheckResult]:
    for name, effect in SLOW_SWITCHES.items():
        if scope.gpus and os.environ.get(name, "0") not in ("0", ""):
            yield warning("variables", f"{name}={os.environ[name]}: {effect}", f"Unset {name}")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        is_set = "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", "")
        if is_set and scope.settings.cluster.colocate and scope.settings.engine.backend in ("sglang", "vllm"):
            text = f"{name} has expandable_segments, with which engines cannot release their memory (cluster.colocate)"
            yield failure("variables", text, f"Unset {name}")


def _libraries() -> Iterator[CheckResult]:
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        libraries = sorted(path.name for pattern in OWN_LIBRARIES for path in Path(folder).glob(pattern))
        if libraries:
            text = f"LD_LIBRARY_PATH={folder} has {libraries[0]}, which replaces torch's own"
            yield warning("variables", text, "Remove the folder from LD_LIBRARY_PATH, unless torch was built with it")


def _proxies(scope: Scope) -> Iterator[CheckResult]:
    for url in scope.settings.engine.url:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme in getproxies() and not proxy_bypass(host):
            text = f"{parts.scheme}_proxy is set and not left out for the engine {host}"
            yield warning("variables", text, f"Add {host} to NO_PROXY")


def _offline(scope: Scope) -> Iterator[CheckResult]:
    from huggingface_hub import constants

    settings = scope.settings
    if not constants.HF_HUB_OFFLINE:
        return
    model = "" if settings.model.path is None or Path(settings.model.path).exists() else settings.model.path
    sources: list[tuple[str, Literal["model", "dataset"]]] = [(model, "model")]
    for source, kind in [*sources, *((name, "dataset") for name in settings.rollout.data)]:
        name = hub_name(source)
        if name is not None and snapshot(name[0], kind) is None:
            remedy = f"Unset HF_HUB_OFFLINE, or download it first: {fetch_command(name[0], kind)}"
            yield failure(
                "variables", f"HF_HUB_OFFLINE is set, and {name[0]} is not in {constants.HF_HUB_CACHE}", remedy
            )
