"""slimectl eval"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from slimectl.cli.options import CLUSTER, ENGINES, SETTINGS, CommonOptions, output_name, print_preflight, with_options
from slimectl.errors import SettingsError
from slimectl.system import stdio

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from slimectl.runtime.stage_functions import Evaluation
    from slimectl.settings import Settings
    from slimectl.types import Metrics


@with_options(
    "data input_key label_key model agent env n temperature rm_type eval_config custom_config out",
    CLUSTER,
    ENGINES,
    SETTINGS,
    "dry_run",
)
def evaluate(
    options: CommonOptions,
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="NAME=PROMPTS", help="Dataset (repeatable)")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", "-n", help="Responses per prompt")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="Softmax temperature. 0 is greedy")] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="File for graded samples", callback=output_name),
    ] = None,
) -> None:
    """Evaluate a model on held-out prompts: accuracy, avg@n, pass@k.

    Prints JSON, or a table on a terminal.

    Example:

        slimectl eval --data aime=aime.jsonl --model models/smollm2 -n 4 --rm-type math --out graded.jsonl
    """
    sources: dict[str, str] = {}
    for name, source in map(_parse_dataset, data or []):
        if name in sources:
            raise SettingsError(
                f"--data {name}={source}: {name} is already {sources[name]}. Give each dataset its own name"
            )
        sources[name] = source
    flags = {"eval.data": sources or None, "eval.n_samples_per_prompt": n, "eval.temperature": temperature}
    from slimectl.data.lent_settings import MEASURED

    resolution = options.resolve(flags, lent=MEASURED)
    settings = resolution.settings
    if not settings.eval.data:
        raise SettingsError("eval.data: no datasets given. Add --data NAME=PROMPTS")
    if options.dry_run:
        print_preflight(resolution, "model", "engine", "datasets", "hooks", "trackers")
        return
    evaluation = _measure(settings, out)
    metrics = evaluation.metrics
    if out != "-" and stdio.is_terminal():
        for line in table(list(settings.eval.data), metrics):
            stdio.emit(line)
    else:
        for name in settings.eval.data:
            stdio.note(summary_line(name, metrics))
        (stdio.say if out == "-" else stdio.emit)(json.dumps(metrics))
    evaluation.check_failures()


def _measure(settings: Settings, out: str | None) -> Evaluation:
    """Evaluate every dataset and return the evaluation. Graded samples are written to `out`, if it is set."""
    from slimectl.cli.output import print_summary, up_to_date
    from slimectl.cli.progress import ProgressBar, loaded
    from slimectl.data.streams import tee
    from slimectl.runtime import builders
    from slimectl.runtime.model_functions import Sampler
    from slimectl.runtime.stage_functions import Evaluation
    from slimectl.stages.evaluate import resolve_dataset_settings

    folder = builders.model_folder(settings.model.path, verify=settings.model.verify)
    for name, source in settings.eval.sources.items():
        own = resolve_dataset_settings(settings, name)
        builders.check_images(own, [source], servers=settings.stage_uses_servers)
    with (
        Evaluation(settings) as evaluation,
        ProgressBar("responses") as progress,
        loaded(lambda: Sampler(settings, folder), progress, _answer_count(settings)) as sampler,
    ):
        samples = tee(evaluation.samples(sampler), lambda sample: progress.advance())
        if out is None:
            for _ in samples:
                pass
        else:
            inputs = [*settings.eval.sources.values(), str(folder)]
            output = up_to_date("eval", settings, inputs, out, force=True)
            assert output is not None
            counts = output.write(samples)
    if out is not None:
        print_summary(counts, {})
    return evaluation


def _answer_count(settings: Settings) -> int | None:
    """Return the number of responses for all datasets, or None if one of them is not a plain file."""
    from slimectl.cli.progress import line_count
    from slimectl.stages.evaluate import resolve_dataset_settings

    total = 0
    for name, source in settings.eval.sources.items():
        if (lines := line_count([source])) is None:
            return None
        total += lines * resolve_dataset_settings(settings, name).eval.n_samples_per_prompt
    return total


def table(names: Sequence[str], metrics: Metrics) -> Iterator[str]:
    """Yield a table with a row per dataset: means with standard errors over prompts, pass@k, response lengths."""
    rates = sorted({rate for name in names for key in metrics if (rate := _rate(name, key))}, key=_rate_order)
    rows = [["dataset", "responses", "accuracy", "mean reward", *rates, "length", "truncated"]]
    for name in names:
        prefix = f"eval/{name}"
        rates_of_dataset = [metrics.get(f"{prefix}-{rate}") for rate in rates]
        rows.append(
            [
                name,
                f"{metrics[f'{prefix}_samples']:.0f}",
                _with_error(metrics, f"{prefix}_accuracy"),
                _with_error(metrics, f"{prefix}_avg_reward"),
                *("-" if rate is None else f"{rate:.3f}" for rate in rates_of_dataset),
                f"{metrics[f'{prefix}/response_len/mean']:.0f}",
                f"{metrics[f'{prefix}-truncated_ratio']:.0%}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        yield "  ".join([cells[0].ljust(widths[0]), *aligned])
    for name in names:
        if notes := _notes(name, metrics):
            yield f"{name}: {notes}"


def _with_error(metrics: Metrics, key: str) -> str:
    error = metrics.get(f"{key}_stderr")
    return f"{metrics[key]:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _rate(name: str, key: str) -> str:
    """Return the rate over several responses (such as `pass@4`) that `key` has for this dataset, or ""."""
    rate = key.removeprefix(f"eval/{name}-")
    return rate if rate != key and rate.startswith(("avg@", "maj@", "pass@")) else ""


def _rate_order(rate: str) -> tuple[str, int]:
    kind, _, count = rate.partition("@")
    return kind, int(count)


def summary_line(name: str, metrics: Metrics) -> str:
    """Return a line with the accuracy of a dataset (failed attempts count as wrong), failures and skipped prompts.

    Includes the mean reward if it differs from the accuracy.
    """
    accuracy, mean = metrics[f"eval/{name}_accuracy"], metrics[f"eval/{name}_avg_reward"]
    reward = f", mean reward {mean:.3f}" if abs(mean - accuracy) > 1e-9 else ""
    notes = _notes(name, metrics)
    return f"{name}: accuracy {accuracy:.3f}{reward}" + (f", {notes}" if notes else "")


def _notes(name: str, metrics: Metrics) -> str:
    """Return failures by kind, samples without a reward and skipped prompts, or "" if there are none."""
    prefix = f"eval/{name}/error/"
    failed = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    notes = [f"{count:.0f} failed ({kind})" for kind, count in failed.items()]
    if unrewarded := metrics.get(f"eval/{name}/no_reward"):
        notes.append(f"{unrewarded:.0f} skipped without a reward")
    if too_long := metrics.get(f"eval/{name}/prompts_too_long"):
        notes.append(f"{too_long:.0f} prompts skipped")
    return ", ".join(notes)


def _parse_dataset(item: str) -> tuple[str, str]:
    name, equals, source = item.partition("=")
    if not equals or not name or not source:
        raise SettingsError(f"--data {item}: write it as NAME=PROMPTS, e.g. --data aime=aime.jsonl")
    return name, source
