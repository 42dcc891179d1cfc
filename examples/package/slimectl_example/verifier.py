"""A verifier of another package."""

from __future__ import annotations

from dataclasses import dataclass

from slimectl.rewards import Grade, Verifier
from slimectl.types import Sample


@dataclass(frozen=True)
class StartsWith(Verifier):
    """1.0 if the response begins with the label; case-sensitive unless `ignore_case`."""

    ignore_case: bool = False

    def explain(self, sample: Sample) -> Grade:
        label, response = str(sample.label), sample.response
        if self.ignore_case:
            label, response = label.casefold(), response.casefold()
        right = response.startswith(label)
        return Grade(float(right), "whole response", f"{'begins' if right else 'does not begin'} with the label")

    def extract(self, sample: Sample) -> str | None:
        return sample.response
