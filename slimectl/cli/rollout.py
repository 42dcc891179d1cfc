"""slimectl rollout"""

from __future__ import annotations

from typing import Annotated

import typer

from slimectl.cli.options import (
    CLUSTER,
    ENGINES,
    SETTINGS,
    CommonOptions,
    needs_destination,
    print_preflight,
    with_options,
)


@with_options(
    "data input_key label_key model agent env out n temperature max_response_len",
    CLUSTER,
    ENGINES,
    "custom_config",
    SETTINGS,
    "force dry_run",
)
def rollout(
    options: CommonOptions,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Softmax temperature")] = None,
    max_response_len: Annotated[
        int | None, typer.Option("--max-response-len", help="Maximum tokens of a response")
    ] = None,
) -> None:
    """Sample responses to prompts.

    Example:

        slimectl rollout --data prompts.jsonl --model models/smollm2 -n 4 > samples.jsonl
    """
    flags = {"rollout.temperature": temperature}
    from slimectl.data.lent_settings import ROLLOUT

    resolution = options.resolve(flags | {"rollout.max_response_len": max_response_len}, lent=ROLLOUT)
    if options.dry_run:
        print_preflight(resolution, "model", "data", "engine", "hooks")
        return
    needs_destination(options.out)
    from slimectl.cli.output import print_summary, up_to_date
    from slimectl.cli.progress import ProgressBar, line_count, loaded
    from slimectl.data.streams import tee
    from slimectl.hooks import check_hooks
    from slimectl.runtime import builders
    from slimectl.runtime.model_functions import Sampler
    from slimectl.stages.failed_attempts import FailureCount
    from slimectl.types import Sample

    settings = resolution.settings
    check_hooks(settings, "rollout.")
    folder = builders.model_folder(settings.model.path, verify=settings.model.verify)
    source = builders.data_source(settings)
    epochs = settings.run.num_epoch or 1
    prompts = iter(()) if source is not None else builders.shard_prompts(settings, epochs=epochs)
    if source is None:
        builders.check_images(settings, settings.rollout.data, servers=settings.stage_uses_servers)
    inputs = [*settings.rollout.data, str(folder)]
    output = up_to_date("rollout", settings, inputs, options.out, options.force)
    if output is None:
        return
    if not options.force:
        output.refuse_other_inputs()
    lines = None if source is not None else line_count(settings.rollout.data)
    total = lines and lines * settings.rollout.n_samples_per_prompt * epochs
    with (
        ProgressBar("samples") as progress,
        loaded(lambda: Sampler(settings, folder), progress, total) as sampler,
    ):
        too_long: list[int] = []
        failures = FailureCount()

        def advance(sample: Sample) -> None:
            progress.advance()
            failures.add(sample)

        samples = sampler.rollout(prompts, source=source, on_skipped=lambda p: too_long.append(p.index))
        counts = output.write(tee(samples, advance))
    print_summary(counts, {"prompts skipped": len(too_long)} if too_long else {}, failures)
    failures.check(settings.rollout, str(failures))
