"""The page of findings, generated from the catalogue: python tests/diagnosis/test_findings_page.py writes it anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from slimectl.diagnosis import Finding
from slimectl.diagnosis.catalogue import DETECTORS, LEARNING, OUT_OF_MEMORY, POLICY, RESOURCES, RESPONSES, STOPPED

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "findings.md"
INTRODUCTION = """# Findings

<!-- tables -->

Everything that [`slimectl diagnose`](../diagnosis.md) can find, with the values of a healthy run, likely causes, and
what to try. An error means that further rounds are wasted, a warning that the run may go wrong, and advice that it
could be faster.
"""
GROUPS = {
    "Learning": LEARNING, "Policy": POLICY, "Responses and grading": RESPONSES,
    "Engines, speed and resources": (*RESOURCES, OUT_OF_MEMORY, STOPPED),
}  # fmt: skip


CODE = re.compile(r"""\b[a-z_]+\.[a-z_]+( = [\w."-]*\w"?)?|slimectl [a-z]+( --?[a-z-]+)*( [\w/]+run\.toml)?""")


def marked(text: str) -> str:
    """A text with its settings and commands in backticks, so that tests/test_docs.py checks the names."""
    return text if "`" in text else CODE.sub(lambda match: f"`{match[0]}`", text)


def lines() -> Iterator[str]:
    yield INTRODUCTION
    for title, detectors in GROUPS.items():
        yield f"## {title}\n"
        for detector in detectors:
            yield f"### {detector.kind}\n\nSeverity: {detector.severity}.\n\n**Healthy.** {detector.healthy}\n"
            for name, texts in (("Causes", detector.causes), ("Try", detector.remedies), ("Look", detector.commands)):
                if texts:
                    texts = [text.replace("{run}", "RUN") for text in texts]
                    items = [f"`{text}`" if name == "Look" else marked(text) for text in texts]
                    yield f"**{name}.**\n\n" + "\n".join(f"- {item}" for item in items) + "\n"


def test_every_finding_leads_to_its_section():
    text = PAGE.read_text(encoding="utf-8")
    for detector in DETECTORS:
        finding = Finding(detector.kind, "", "error", 1, None, (), (), (), ("",))
        path, _, anchor = finding.link.partition("#")
        assert (PAGE.parents[2] / path) == PAGE
        assert f"\n### {anchor}\n" in text


def test_the_page_is_that_of_the_catalogue():
    assert PAGE.read_text(encoding="utf-8") == "\n".join(lines())


def test_troubleshooting_leads_to_findings_of_the_catalogue_and_covers_the_errors():
    page = (PAGE.parents[1] / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"findings\.md#([\w-]+)", page))
    kinds = {detector.kind: detector for detectors in GROUPS.values() for detector in detectors}
    assert linked <= kinds.keys()
    errors = {kind for kind, detector in kinds.items() if detector.severity == "error"}
    assert errors - linked == {"duplicates"}  # in the row of repetition


if __name__ == "__main__":
    PAGE.write_text("\n".join(lines()), encoding="utf-8")
