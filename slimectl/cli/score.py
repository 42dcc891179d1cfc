"""slimectl score"""

from __future__ import annotations

from typing import Annotated

import typer

from slimectl.cli.options import (
    Assign,
    Config,
    DryRun,
    Force,
    OnError,
    Out,
    RmType,
    Samples,
    Workers,
    check_on_error,
    needs_destination,
    print_settings,
    resolved,
)


def score(
    samples: Samples = "-",
    rm_type: RmType = None,
    custom_rm_path: Annotated[
        str | None, typer.Option("--custom-rm-path", help="Your reward function, by path")
    ] = None,
    reference: Annotated[str | None, typer.Option("--reference", help="Model whose log-probs to attach")] = None,
    workers: Workers = None,
    out: Out = "-",
    on_error: OnError = "stop",
    config: Config = None,
    assign: Assign = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Attach a reward to every sample.

    Example:

        slimectl score samples.jsonl --rm-type math > scored.jsonl
    """
    flags = {"score.rm_type": rm_type, "score.custom_rm_path": custom_rm_path, "score.workers": workers}
    found = resolved(config, assign, flags)
    check_on_error(on_error)
    if dry_run:
        print_settings(found)
        return
    needs_destination(out)
    from statistics import fmean

    from slimectl import wiring
    from slimectl.cli.records import say, told, up_to_date, write_out
    from slimectl.data.jsonl import read_samples
    from slimectl.stages.score import reward_number
    from slimectl.stages.score import score as stage
    from slimectl.streams import tee

    settings = found.settings
    inputs = [samples] if samples != "-" else []
    reward = wiring.reward(settings)
    manifest = up_to_date("score", settings, inputs, out, force or samples == "-")
    if manifest is None:
        return
    frozen = wiring.frozen(settings, wiring.model_folder(reference, setting="--reference")) if reference else None
    executor = wiring.executor()
    rewards: list[float] = []
    try:
        read = read_samples(samples, on_error=on_error, report=say)
        scored = stage(read, reward, settings.score, executor=executor, reference=frozen)
        counted = tee(scored, lambda sample: rewards.append(reward_number(sample, settings.score.reward_key)))
        counts = write_out(counted, out, manifest, inputs)
    finally:
        executor.close()
    told(counts, {"mean reward": f"{fmean(rewards):.4g}"} if rewards else {})
