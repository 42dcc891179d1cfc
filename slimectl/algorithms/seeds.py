"""Sampling seeds that depend on the prompt and sample only, not on time, order or process."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, prompt: str, sample_index: int) -> int:
    """Return a seed in [0, 2^63) for one sample; the same in every process and on every machine.

    It uses blake2b and not `hash()`, which Python salts anew in each process. Fields are joined by a byte that numbers
    cannot contain, the prompt last, so no two triples give the same bytes.
    """
    key = b"\0".join([str(run_seed).encode(), str(sample_index).encode(), prompt.encode("utf-8", "surrogatepass")])
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
