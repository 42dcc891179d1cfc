"""slimectl doctor"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from slimectl.cli.options import CLUSTER, SETTINGS, AsJson, CommonOptions, with_options
from slimectl.errors import SettingsError, SlimectlError


@with_options("engine steps model backend", CLUSTER, "engine_url", SETTINGS, "as_json")
def doctor(
    options: CommonOptions,
    engine: Annotated[
        bool, typer.Option("--engine", help="Compare engine and trainer in a loop with learning rate 0")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of the --engine loop")] = 3,
    as_json: AsJson = False,
) -> None:
    """Check this machine's setup. With --engine, compare engine and trainer log-probabilities.

    Prints one line per check. The exit code is 1 if a check fails.

    Example:

        slimectl doctor --engine --model models/smollm2 -s engine.backend=embedded
    """
    from slimectl.runtime.machine import CheckResult, machine

    findings: list[CheckResult] = []
    checks = machine()
    if engine:
        from slimectl.runtime.self_test import self_test

        settings = options.resolve().settings
        if settings.model.path is None:
            raise SettingsError("model.path: no model given. Add --model DIR, a Hugging Face checkpoint directory")
        tested = {
            "score": settings.score.model_copy(update={"rm_type": "random", "custom_rm_path": None, "rm": []}),
            "run": settings.run.model_copy(update={"rollout_batch_size": 4, "num_rollout": steps, "num_epoch": None}),
        }
        if not settings.rollout.data:
            source = {"data": ["slimectl.runtime.self_test:questions"]}
            tested["rollout"] = settings.rollout.model_copy(update=source)
        checks = self_test(settings.model_copy(update=tested), steps=steps)
    for finding in checks:
        print(json.dumps(finding.to_json()) if as_json else finding, flush=True)
        findings.append(finding)
    if failed := [finding.what for finding in findings if finding.fine is False]:
        raise SlimectlError(f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}")
