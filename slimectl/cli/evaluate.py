"""slimectl eval"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from slimectl import stdio
from slimectl.cli.options import CLUSTER, ENGINES, SETTINGS, CommonOptions, output_name, print_settings, with_options
from slimectl.errors import SettingsError

if TYPE_CHECKING:
    from slimectl.settings import Settings
    from slimectl.types import Metrics


@with_options("data model n temperature rm_type eval_config out", CLUSTER, ENGINES, SETTINGS, "dry_run")
def evaluate(
    options: CommonOptions,
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="NAME=PROMPTS", help="Dataset; several may be given")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", "-n", help="Answers for each prompt")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Softmax temperature; 0 is greedy")] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="Where graded samples go", callback=output_name),
    ] = None,
) -> None:
    """Measure a model on held-out prompts: accuracy, avg@n, pass@k; metrics as JSON on stdout.

    Example:

        slimectl eval --data aime=aime.jsonl --model models/smollm2 -n 4 --rm-type math --out graded.jsonl
    """
    sources: dict[str, str] = {}
    for name, source in map(_parse_dataset, data or []):
        if name in sources:
            raise SettingsError(
                f"--data {name}={source}: {name} is {sources[name]} already; give each dataset its name"
            )
        sources[name] = source
    flags = {"eval.data": sources or None, "eval.n_samples_per_prompt": n, "eval.temperature": temperature}
    resolution = options.resolve(flags)
    settings = resolution.settings
    if not settings.eval.data:
        raise SettingsError("eval.data: no datasets are given; add --data NAME=PROMPTS")
    if options.dry_run:
        print_settings(resolution)
        return
    import json

    metrics = _measure(settings, out)
    for name in settings.eval.data:
        stdio.say(summary_line(name, metrics))
    (stdio.say if out == "-" else stdio.emit)(json.dumps(metrics))


def _measure(settings: Settings, out: str | None) -> Metrics:
    """Evaluate every dataset and return its metrics; graded samples are written to `out`, if any."""
    from slimectl import builders
    from slimectl.api.models import Sampler
    from slimectl.api.stages import Evaluation
    from slimectl.cli.output import print_summary, up_to_date, write_out

    evaluation = Evaluation(settings)
    folder = builders.model_folder(settings.model.path, verify=settings.model.verify)
    with Sampler(settings, folder) as sampler:
        if out is None:
            for _ in evaluation.samples(sampler):
                pass
        else:
            inputs = [*settings.eval.sources.values(), str(folder)]
            manifest = up_to_date("eval", settings, inputs, out, force=True)
            assert manifest is not None
            print_summary(write_out(evaluation.samples(sampler), out, manifest, inputs), {})
    return evaluation.metrics


def summary_line(name: str, metrics: Metrics) -> str:
    """One line with the accuracy of a dataset (failed attempts count as wrong), failures and skipped prompts."""
    prefix = f"eval/{name}/error/"
    failed = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    suffix = "".join(f", {count:.0f} failed of {kind}" for kind, count in failed.items())
    too_long = metrics.get(f"eval/{name}/prompts_too_long", 0)
    suffix += f", {too_long:.0f} prompts left out as too long" if too_long else ""
    return f"{name}: accuracy {metrics[f'eval/{name}_accuracy']:.3f}{suffix}"


def _parse_dataset(item: str) -> tuple[str, str]:
    name, equals, source = item.partition("=")
    if not equals or not name or not source:
        raise SettingsError(f"--data {item}: write it as NAME=PROMPTS, e.g. --data aime=aime.jsonl")
    return name, source
