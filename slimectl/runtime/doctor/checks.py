"""The table of checks of `slimectl doctor`: cheap ones first, then kernels, engines and the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from slimectl.runtime.check_result import CheckResult, warning
from slimectl.runtime.doctor import environment, gpus, host, libraries
from slimectl.runtime.doctor.scope import Scope


def machines(scope: Scope) -> Iterator[CheckResult]:
    """Warn that the settings use other machines too."""
    if (nodes := scope.placement.nodes) > 1:
        remedy = f"Check all: srun --nodes={nodes} --ntasks-per-node=1 --label slimectl doctor, with the same settings"
        yield warning("machines", f"only this one was checked, and the settings use {nodes}", remedy)


Check = Callable[[Scope], Iterator[CheckResult]]

CHECKS: Mapping[str, Sequence[Check]] = {
    "Software": (host.python, host.packages),
    "Machine": (host.processors, host.memory, host.shared_memory, host.limits),
    "Network and environment": (environment.network, environment.variables),
    "GPUs": (gpus.driver, gpus.visibility, gpus.memory, gpus.fields, gpus.links),
    "Tests": (libraries.libraries, libraries.engine, host.disk, machines),
}
"""All checks by group, in the order in which they run."""


def examine(scope: Scope) -> Iterator[tuple[str, CheckResult]]:
    """Yield the group and the result of every check."""
    for group, checks in CHECKS.items():
        for check in checks:
            for result in check(scope):
                yield group, result
