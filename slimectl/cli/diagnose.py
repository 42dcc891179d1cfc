"""slimectl diagnose"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimectl.cli.options import AsJson
from slimectl.cli.terminal import has_colours, paint, safe_json, visible, width
from slimectl.system.stdio import quantity

if TYPE_CHECKING:
    from slimectl.diagnosis import Evidence, Finding

MARGIN = 10
"""Width of the names on the left, in columns."""
COLOURS = {"error": "31", "warning": "33", "advice": "36"}


def diagnose(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, which may still be running")],
    as_json: AsJson = False,
) -> None:
    """Find what goes wrong in a run: signal, policy, responses, grading, engine, speed.

    Reads the run's records only. Every finding has its evidence, likely causes, settings to change, and commands that
    show samples. An error means that further rounds are wasted, a warning that the run may go wrong, and advice that it
    could be faster.

    Example:

        slimectl diagnose runs/quickstart
    """
    from slimectl.diagnosis import diagnose_run
    from slimectl.system.model_files import follow_links

    folder = follow_links(run)
    findings = diagnose_run(folder)
    if as_json:
        for finding in findings:
            print(safe_json(finding.to_json()))
        return
    print(_head(folder, findings))
    for finding in findings:
        print()
        for line in finding_lines(finding):
            print(line)


def _head(folder: Path, findings: list[Finding]) -> str:
    from slimectl.cli.viewer.library import RunSource
    from slimectl.cli.viewer.run_table import summary

    progress = summary(RunSource("", folder))
    rounds = quantity(progress["rounds"], "round") if progress["rounds"] else "no round recorded yet"
    lasting = sum(finding.lasts for finding in findings)
    count = quantity(len(findings), "finding") if findings else "no findings"
    last = f", {lasting} of them last" if 0 < lasting < len(findings) else ""
    return f"{folder}: {rounds}, {progress['state']}, {count}{last}"


def finding_lines(finding: Finding) -> Iterator[str]:
    """Yield the lines of a finding on the terminal, fitted to its width."""
    import textwrap

    columns = max(40, width())
    name = f"{finding.severity:<{MARGIN}}"
    name = paint(name, COLOURS[finding.severity]) if has_colours() else name
    title = textwrap.wrap(f"{visible(finding.title)} ({finding.place})", columns - MARGIN)
    yield name + title[0]
    blocks = [
        ("", title[1:]),
        ("evidence", [_evidence_line(item) for item in finding.evidence]),
        ("causes", finding.causes),
        ("try", finding.remedies),
        ("look", finding.commands),
        ("read", [finding.link]),
    ]
    for title_of, texts in blocks:
        for number, text in enumerate(texts):
            label = title_of if number == 0 else ""
            # Commands are not wrapped, so that they can be copied.
            lines = [text] if title_of == "look" else textwrap.wrap(visible(text), columns - MARGIN) or [""]
            for line in lines:
                yield f"{label:<{MARGIN}}{line}"
                label = ""


def _evidence_line(evidence: Evidence) -> str:
    rounds = f"round {evidence.rounds[0]}"
    if len(evidence.rounds) > 1:
        rounds = f"rounds {evidence.rounds[0]} to {evidence.rounds[-1]}"
    return f"{evidence.metric} in {rounds}: {', '.join(f'{value:.3g}' for value in evidence.values)}"
