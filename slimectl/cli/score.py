"""slimectl score"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimectl.cli.options import CLUSTER, SETTINGS, CommonOptions, needs_destination, print_preflight, with_options
from slimectl.errors import RecordError, SlimectlError
from slimectl.system import stdio

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from slimectl.cli.output import StageOutput
    from slimectl.data.skip_counts import SkippedLines
    from slimectl.rewards import ComponentValues
    from slimectl.settings import Settings
    from slimectl.types import Sample


@with_options(
    "samples rm_type custom_rm_path reference explain check workers",
    CLUSTER,
    "out on_error custom_config",
    SETTINGS,
    "force dry_run",
)
def score(
    options: CommonOptions,
    custom_rm_path: Annotated[
        str | None, typer.Option("--custom-rm-path", help="Your own reward function, e.g. my_reward.py:reward")
    ] = None,
    reference: Annotated[
        str | None, typer.Option("--reference", help="Attach the log-probabilities of this reference model")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain each reward in metadata.explanation and in a summary")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Validate the reward before you train with it. Exit code 1 if a check fails")
    ] = False,
) -> None:
    """Attach a reward to every sample.

    Example:

        slimectl score samples.jsonl --rm-type math > scored.jsonl
    """
    resolution = options.resolve({"score.custom_rm_path": custom_rm_path, "score.explain": explain or None})
    if options.dry_run:
        if reference is not None:
            from slimectl.runtime.builders import model_folder

            model_folder(reference, setting="--reference")
        print_preflight(resolution, "reward", "hooks", samples=options.sample_paths)
        return
    settings, paths, out = resolution.settings, options.sample_paths, options.out
    lines = explain and out == "-" and stdio.is_terminal()
    if not check and not lines:
        needs_destination(out)
    from slimectl.chats.model_tokens import vocabulary_size
    from slimectl.cli.output import up_to_date
    from slimectl.data.jsonl import joined_name, read_samples
    from slimectl.data.skip_counts import SkippedLines
    from slimectl.runtime import builders

    skipped = SkippedLines(joined_name(paths), stdio.logger.warning)
    read = read_samples(
        paths,
        on_error="skip" if options.on_error == "skip" else "stop",
        report=skipped.add_bad_line,
        on_line=skipped.add_line,
        allow_reward_paths=settings.score.allow_paths_in_records,
        answered=True,
        vocabulary=vocabulary_size(builders.model_folder(reference, setting="--reference")) if reference else None,
    )
    if check:
        _check(read, settings)
        skipped.report()
        return
    builders.reward(settings)
    output = up_to_date("score", settings, input_files(options), out, options.force or "-" in paths)
    if output is None:
        return
    try:
        _grade_samples(read, options, settings, output, reference=reference, lines=lines, skipped=skipped)
    finally:
        skipped.report()


def input_files(options: CommonOptions) -> list[str]:
    return [path for path in options.sample_paths if path != "-"]


def _grade_samples(
    read: Iterator[Sample],
    options: CommonOptions,
    settings: Settings,
    output: StageOutput,
    *,
    reference: str | None,
    lines: bool,
    skipped: SkippedLines,
) -> None:
    """Grade samples and write them to --out with a summary, or print one line per sample to the terminal."""
    from slimectl.cli.output import print_summary
    from slimectl.cli.progress import ProgressBar, line_count
    from slimectl.data.io import is_pipe
    from slimectl.data.resumable import can_be_resumable
    from slimectl.data.skip_counts import locate
    from slimectl.data.streams import tee
    from slimectl.rewards import ComponentValues
    from slimectl.runtime import builders
    from slimectl.runtime.stage_functions import score as stage
    from slimectl.stages.score import reward_number

    skips = options.on_error == "skip"
    reward = builders.reward(settings)
    frozen = builders.frozen(settings, builders.model_folder(reference, setting="--reference")) if reference else None
    rewards: list[float] = []
    parts = ComponentValues(settings.score.reward_key)
    reasons = Reasons(settings.score.reward_key)
    late = Counter[str]()

    def count(sample: Sample) -> None:
        progress.advance()
        skipped.pass_line()
        late["over the time limit"] += "reward_error" in sample.metadata
        late["without a reward"] += sample.has_no_reward
        if not sample.has_no_reward:
            rewards.append(reward_number(sample, settings.score.reward_key))
            parts.add(sample.reward, prompt=sample.group_index)
        reasons.add(sample)

    def graded(samples: Iterable[Sample]) -> Iterator[Sample]:
        skip = (lambda sample, error: skipped.add_ungraded(error)) if skips else None
        try:
            yield from stage(samples, settings, reward=reward, reference=frozen, skip=skip)
        except RecordError as error:  # raised for the sample after the last one
            raise locate(error, skipped.pass_line()) from error

    with ProgressBar("samples", total=line_count(options.sample_paths)) as progress:
        if lines:
            _print_reasons(tee(graded(read), count), settings.score.reward_key)
            return
        # A reference model is not part of the settings that identify an interrupted output.
        is_repeatable = not any(map(is_pipe, options.sample_paths))
        if is_repeatable and reference is None and can_be_resumable(output.out):
            counts = output.write_resumable(
                graded, read, on_sample=count, on_gap=skipped.add_earlier if skips else None,
                force=options.force, whole_groups=settings.score.group_rm,
            )  # fmt: skip
        else:
            counts = output.write(tee(graded(read), count))
    if settings.score.explain:
        for line in reasons.lines():
            stdio.note(line)
    print_summary(counts, _means(rewards, parts, settings.eval.success_threshold) | (+late))


def _means(rewards: list[float], parts: ComponentValues, threshold: float) -> dict[str, str]:
    """Return the mean reward and the means of its components.

    If there are rewards other than 0 and the threshold, also return the accuracy.
    """
    from statistics import fmean

    from slimectl.rewards.components import means_text

    means = {"mean reward": f"{fmean(rewards):.4g}{means_text(parts.means())}"} if rewards else {}
    if set(rewards) - {0.0, threshold}:
        means["accuracy"] = f"{fmean(reward >= threshold for reward in rewards):.4g} (reward >= {threshold:g})"
    return means


def _print_reasons(samples: Iterable[Sample], reward_key: str | None) -> None:
    """Print one line per sample to a terminal."""
    for sample in samples:
        stdio.emit(f"sample {sample.index}: {_reward(sample, reward_key, 4)}: {reason(sample)}")


def _reward(sample: Sample, reward_key: str | None, digits: int) -> str:
    from slimectl.stages.score import reward_number

    return "no reward" if sample.has_no_reward else f"reward {reward_number(sample, reward_key):.{digits}g}"


def _check(samples: Iterable[Sample], settings: Settings) -> None:
    """Check the reward, with one line per check on stdout. Raises SlimectlError if a check failed."""
    from slimectl.runtime import builders
    from slimectl.stages.check_reward import check_reward

    sample_list = list(samples)
    if not sample_list:
        raise RecordError("no samples. --check grades the samples of a file or pipe.")
    reward, graders = builders.reward(settings), builders.executor(settings, trains=False)
    findings = []
    try:
        for finding in check_reward(sample_list, reward, settings.score, executor=graders, bounds=reward.bounds):
            stdio.emit(str(finding))
            findings.append(finding)
    finally:
        graders.close()
    if failed := [finding.check for finding in findings if not finding.fine]:
        raise SlimectlError(
            f"{len(failed)} of {len(findings)} checks failed ({', '.join(failed)}). Fix the reward function first."
        )


MAX_GROUPS = 10


def reason(sample: Sample) -> str:
    """Return a one-line explanation of a sample's reward: source, extracted answer and reason."""
    explanation = sample.metadata.get("explanation")
    if explanation is None:
        return str(sample.metadata.get("reward_error", f"not graded: {sample.status}"))
    return explanation_text(explanation)


def explanation_text(explanation: Mapping[str, Any]) -> str:
    """Return an explanation in one line: source, extracted answer and reason."""
    if explanation["extracted"] is None:
        return f"{explanation['from']}: {explanation['why']}"
    text = " ".join(explanation["extracted"].split())
    text = text if len(text) <= 60 else f"{text[:30]}…{text[-30:]}"
    return f"{explanation['from']}: '{text}' {explanation['why']}"


class Reasons:
    """Counts samples by reward and source of the answer, with one example each."""

    def __init__(self, reward_key: str | None) -> None:
        self._reward_key = reward_key
        self._groups: dict[tuple[str, str, bool], tuple[int, Sample]] = {}

    def add(self, sample: Sample) -> None:
        explanation = sample.metadata.get("explanation") or {}
        key = (_reward(sample, self._reward_key, 3), explanation.get("from", ""), explanation.get("extracted") is None)
        count, example = self._groups.get(key, (0, sample))
        self._groups[key] = (count + 1, example)

    def lines(self) -> Iterator[str]:
        """Yield one line per group, largest first."""
        groups = sorted(self._groups.items(), key=lambda group: -group[1][0])
        for (reward, _, _), (count, example) in groups[:MAX_GROUPS]:
            yield f"{reward}: {stdio.quantity(count, 'sample')}, e.g. sample {example.index}: {reason(example)}"
        if remaining := sum(count for _, (count, _) in groups[MAX_GROUPS:]):
            yield f"{remaining} samples in {len(groups) - MAX_GROUPS} more groups"
