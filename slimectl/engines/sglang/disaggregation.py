"""Prefill/decode disaggregation of SGLang: flags of both roles, their ports, the library that moves the cache."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from slimectl.engines.supervisor.installed import PROBE_TIMEOUT_S
from slimectl.errors import BackendError

ROLES = ("regular", "prefill", "decode")

BACKEND = "disaggregation_transfer_backend"
"""Field of `[sglang.args]` that names what moves keys and values from prefill to decode."""

ON_CPU = "mooncake_tcp"
"""Default without a GPU: Mooncake over TCP. SGLang's own default, Mooncake over RDMA, needs such network cards."""

MOONCAKE = ("mooncake.engine", "mooncake-transfer-engine")
LIBRARIES = {
    "mooncake": MOONCAKE,
    "mooncake_tcp": MOONCAKE,
    "nixl": ("nixl._api", "nixl"),
    "mori": ("mori.io", "mori"),
}
"""Module of each transfer backend, and the package that has it."""

CPU_BUILD = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
"""Package of Mooncake without CUDA; its library libibverbs.so.1 comes from the system (Debian: libibverbs1)."""


def bootstrap_port(port: int) -> int:
    """Return the port at which decode servers meet a prefill server, from that of its HTTP API.

    It follows from the address, so a restarted server needs no other message to the router.
    """
    return port + 1


def role_flags(role: str | None, args: Mapping[str, Any], *, device: str) -> list[str]:
    """Return the flags of a server that only prefills or only decodes; none for `role` None."""
    if role is None:
        return []
    backend = [f"--{BACKEND.replace('_', '-')}={ON_CPU}"] if device == "cpu" and BACKEND not in args else []
    return [f"--disaggregation-mode={role}", *backend]


def bootstrap_flags(role: str | None, port: int) -> list[str]:
    """Return the flags of a prefill server that listens at `port`."""
    return [f"--disaggregation-bootstrap-port={bootstrap_port(port)}"] if role == "prefill" else []


def check_transfer(args: Mapping[str, Any], python: str, *, device: str, roles: Sequence[str]) -> None:
    """Check that SGLang's Python can import what moves keys and values between prefill and decode.

    SGLang itself finds out after the model is loaded. Raises BackendError.
    """
    if not set(roles) - {"regular"}:
        return
    backend = str(args.get(BACKEND, ON_CPU if device == "cpu" else "mooncake"))
    if backend not in LIBRARIES:
        return
    module, package = LIBRARIES[backend]
    command = [python, "-E", "-c", f"import {module}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    if result.returncode:
        error = (result.stderr.strip().splitlines() or ["it says nothing"])[-1]
        wanted = CPU_BUILD if device == "cpu" and "mooncake" in backend else package
        system = ", and apt-get install libibverbs1" if "libibverbs" in error else ""
        raise BackendError(
            f"sglang.args.{BACKEND}: {backend}: {python} cannot import {module} ({error}); run: "
            f"{python} -m pip install --no-deps {wanted}{system}"
        )
