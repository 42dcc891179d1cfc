"""Random rewards, a control for experiments."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from slimectl.errors import SettingsError
from slimectl.rewards.verdict import Verdict, Verifier, nothing
from slimectl.types import Sample


@dataclass(frozen=True)
class Random(Verifier):
    """1.0 with probability `p`, else 0.0; deterministic for a sample (index and response) and `seed`."""

    seed: int = 0
    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise SettingsError(f"score.rm_options.p: {self.p} is no probability; give 0 to 1")

    def explain(self, sample: Sample) -> Verdict:
        key = f"{self.seed}\0{sample.index}\0{sample.response}".encode("utf-8", "surrogatepass")
        drawn = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64
        right = drawn < self.p
        return nothing("seeded coin", f"drew {drawn:.3f}, {'below' if right else 'not below'} {self.p:g}", float(right))

    def extract(self, sample: Sample) -> str | None:
        return None
