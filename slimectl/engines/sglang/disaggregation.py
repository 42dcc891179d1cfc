"""Prefill/decode disaggregation in SGLang: flags and ports of both roles, and the transfer library."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from slimectl.engines.supervisor.installed import PROBE_TIMEOUT_S
from slimectl.errors import BackendError

ROLES = ("regular", "prefill", "decode")

BACKEND = "disaggregation_transfer_backend"
"""Field of `[sglang.args]` that selects the library to move keys and values from prefill to decode."""

ON_CPU = "mooncake_tcp"
"""Default without a GPU: Mooncake over TCP. SGLang's own default, Mooncake over RDMA, needs RDMA network cards."""

MOONCAKE = ("mooncake.engine", "mooncake-transfer-engine")
LIBRARIES = {
    "mooncake": MOONCAKE,
    "mooncake_tcp": MOONCAKE,
    "nixl": ("nixl._api", "nixl"),
    "mori": ("mori.io", "mori"),
}
"""The module of each transfer backend, and the package that provides it."""

CPU_BUILD = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
"""The Mooncake package without CUDA. It needs libibverbs.so.1 from the system (Debian: libibverbs1)."""


def bootstrap_port(port: int) -> int:
    """Return the port where decode servers meet a prefill server, derived from its HTTP port.

    Because it follows from the address, a restarted server does not have to tell the router.
    """
    return port + 1


def role_flags(role: str, args: Mapping[str, Any], *, device: str) -> list[str]:
    """Return the flags of a server that only prefills or only decodes, or none for a regular one."""
    if role == "regular":
        return []
    backend = [f"--{BACKEND.replace('_', '-')}={ON_CPU}"] if device == "cpu" and BACKEND not in args else []
    return [f"--disaggregation-mode={role}", *backend]


def bootstrap_flags(role: str, port: int) -> list[str]:
    """Return the flags of a prefill server that listens on `port`."""
    return [f"--disaggregation-bootstrap-port={bootstrap_port(port)}"] if role == "prefill" else []


def check_transfer(args: Mapping[str, Any], python: str, *, device: str, roles: Sequence[str]) -> None:
    """Check that SGLang's Python can import the library that moves keys and values between prefill and decode.

    SGLang itself checks only after loading the model. Raises BackendError.
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
        error = (result.stderr.strip().splitlines() or ["no error message"])[-1]
        requirement = CPU_BUILD if device == "cpu" and "mooncake" in backend else package
        system = ", and apt-get install libibverbs1" if "libibverbs" in error else ""
        raise BackendError(
            f"sglang.args.{BACKEND}: {backend}: {python} cannot import {module} ({error}). Run: "
            f"{python} -m pip install --no-deps {requirement}{system}"
        )
