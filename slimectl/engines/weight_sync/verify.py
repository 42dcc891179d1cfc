"""Verifies weight sync: compares every tensor by checksum in the trainer and in the engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from slimectl.data.hashing import tensor_checksum
from slimectl.data.ownership import remove_made
from slimectl.engines.weight_sync.base import Precision, WeightSyncBase, cast, drained
from slimectl.engines.weight_sync.disk import Write, write_checkpoint
from slimectl.errors import BackendError
from slimectl.protocols import NamedTensors, WeightUpdateClient
from slimectl.types import Metrics

HEAD = "lm_head.weight"
NAMED = 3
"""Number of tensors that an error lists."""


class VerifiedSync(WeightSyncBase):
    """Verifies every push of another transport. `dtype` is the engines' precision.

    `slimectl serve` hashes tensors under their Hugging Face names, which are compared with the trainer's hashes. SGLang
    hashes its own fused and sharded tensors. There they are overwritten with noise and loaded again, from a checkpoint
    in `folder`, and every hash must equal the earlier one. A mismatch raises BackendError.
    """

    def __init__(self, sync: WeightSyncBase, *, folder: Path, write: Write, dtype: Precision = None) -> None:
        super().__init__(sync.policy, sync.workers, pause_mode=sync.pause_mode)
        self.sync, self.folder, self.write, self.dtype = sync, Path(folder), write, dtype

    def _push(self, workers: WeightUpdateClient, version: str) -> Metrics:
        metrics = self.sync._push(workers, version)
        try:
            self.check(workers)
        except BackendError:
            # From another thread: the policy may have made a step since the push, and is pushed again.
            if self.policy.weight_version == version:
                raise
        return metrics

    def close(self) -> None:
        self.sync.close()

    def check(self, workers: WeightUpdateClient) -> None:
        """Compare the workers' tensors with the policy's. Raises BackendError, which lists the first that differ."""
        if workers.checksums_by_hf_name:
            expected = [self.policy.consume_weights(partial(_checksums, dtype=self.dtype))] * len(workers.urls)
            _compare(workers, expected, workers.checksums())
            return
        version, target = self.policy.weight_version, self.folder / "check"
        write = partial(write_checkpoint, target=target, write=self.write, dtype=self.dtype)
        self.policy.consume_weights(write)
        try:
            pushed = workers.checksums()
            with self.paused(workers):
                workers.randomize_weights()
                workers.load_disk(target, version=version)
            _compare(workers, workers.checksums(), pushed)
        finally:
            remove_made(target)


def _checksums(tensors: NamedTensors, *, dtype: Precision) -> dict[str, str]:
    """Compute the checksum of every tensor, in the process that has the weights."""
    with drained(tensors) as stream:
        return {name: tensor_checksum(tensor) for name, tensor in cast(stream, dtype)}


def _compare(
    workers: WeightUpdateClient, expected: Sequence[Mapping[str, str]], reported: Sequence[Mapping[str, str]]
) -> None:
    for url, hashes, engine_hashes in zip(workers.urls, expected, reported, strict=True):
        # A tied head is the embedding: the trainer may list it, but the engine has no separate tensor for it.
        comparable = {name: checksum for name, checksum in hashes.items() if name in engine_hashes or name != HEAD}
        wrong = [
            name for name in comparable.keys() | engine_hashes.keys() if comparable.get(name) != engine_hashes.get(name)
        ]
        if wrong:
            more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            raise BackendError(
                f"engine at {url}: {', '.join(sorted(wrong)[:NAMED])}{more} of {len(hashes)} tensors differ from"
                " those pushed. Does it serve this model, in the precision of engine.dtype?"
            )
