"""slimectl rollout"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from slimectl.cli.options import (
    Assign,
    Config,
    Data,
    DryRun,
    Engine,
    Engines,
    EngineUrl,
    Executor,
    Force,
    Model,
    Out,
    RayAddress,
    cluster_flags,
    engine_flags,
    needs_destination,
    print_settings,
    resolved,
)


def rollout(
    data: Data = None,
    model: Model = None,
    out: Out = "-",
    n: Annotated[int | None, typer.Option("--n", "-n", help="Answers for each prompt")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Softmax temperature")] = None,
    max_response_len: Annotated[
        int | None, typer.Option("--max-response-len", help="Tokens an answer may have")
    ] = None,
    executor: Executor = None,
    ray_address: RayAddress = None,
    engine: Engine = None,
    engines: Engines = None,
    engine_url: EngineUrl = None,
    config: Config = None,
    assign: Assign = None,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Sample answers to prompts.

    Example:

        slimectl rollout --data prompts.jsonl --model models/smollm2 -n 4 > samples.jsonl
    """
    flags: dict[str, Any] = {"rollout.data": data, "model.path": model, "rollout.n_samples_per_prompt": n}
    flags |= {"rollout.temperature": temperature, "rollout.max_response_len": max_response_len}
    flags |= cluster_flags(executor, ray_address) | engine_flags(engine, engines, engine_url)
    resolution = resolved(config, assign, flags)
    if dry_run:
        print_settings(resolution)
        return
    needs_destination(out)
    from slimectl import builders
    from slimectl.cli.output import print_summary, up_to_date, write_out
    from slimectl.hooks import check_hooks

    settings = resolution.settings
    check_hooks(settings, "rollout.")
    folder = builders.model_folder(settings.model.path, verify=settings.model.verify)
    source = builders.data_source(settings)
    prompts = (
        iter(())
        if source is not None
        else builders.prompts(settings, list(settings.rollout.data), epochs=settings.run.num_epoch or 1)
    )
    inputs = [*settings.rollout.data, str(folder)]
    manifest = up_to_date("rollout", settings, inputs, out, force)
    if manifest is None:
        return
    tokenizer = builders.tokenizer(folder)
    with builders.engines(settings, folder, tokenizer) as sampling:
        too_long: list[int] = []
        samples = builders.rollout_samples(
            settings, prompts, sampling, tokenizer, source=source, left_out=lambda p: too_long.append(p.index)
        )
        counts = write_out(samples, out, manifest, inputs)
        print_summary(counts, {"prompts too long": len(too_long)} if too_long else {})
