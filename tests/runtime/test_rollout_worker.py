"""Pushes over which a server dies: made again once it is back, given up where that was not the reason. Rounds and
evaluations of an engine in this process leave nothing behind that changes the digits of the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.weight_sync.base import WeightSynchronizer
from slimectl.errors import BackendError
from slimectl.runtime.rollout_worker import RolloutWorker
from slimectl.runtime.stage_functions import load_settings
from slimectl.types import Metrics, SamplerState


class Watched:
    """As many losses as there were deaths; the watch may have seen a death before anybody asks."""

    def __init__(self) -> None:
        self.losses = 0
        self.dead = 0
        self.pushed: list[str] = []

    @contextmanager
    def pause_watch(self) -> Iterator[None]:
        yield

    def mend(self) -> None:
        self.losses, self.dead = self.losses + self.dead, 0

    def note_push(self, version: str) -> None:
        self.pushed.append(version)

    def settle(self) -> None:
        self.mend()


class Line:
    """A transport that fails as often as it is told, by a death that the watch sees at once, later, or not at all."""

    def __init__(self, fleet: Watched, *seen: str) -> None:
        self.fleet, self.seen, self.pushes = fleet, list(seen), 0

    def push(self) -> Metrics:
        self.pushes += 1
        if not self.seen:
            return {"bytes": 1.0}
        how = self.seen.pop(0)
        self.fleet.dead += how != "no death"
        if how == "at once":
            self.fleet.mend()
        raise BackendError("engine at http://a:1 is not there")


class Third:
    """A policy after two steps, as far as a push looks at it."""

    weight_version = "2"


@pytest.mark.parametrize("seen", [["at once"], ["later"], ["at once", "later"]])
def test_a_push_over_which_servers_died_is_made_again(seen: list[str]):
    fleet: Any = Watched()
    line: Any = Line(fleet, *seen)
    sync = WeightSynchronizer(line, Third(), pool=fleet)  # type: ignore[arg-type]
    assert sync.push() == {"bytes": 1.0}
    assert (line.pushes, fleet.losses, sync.version) == (len(seen) + 1, len(seen), "2")
    assert fleet.pushed == ["2"]


def test_a_push_that_living_servers_refuse_fails():
    fleet: Any = Watched()
    line: Any = Line(fleet, "no death")
    sync = WeightSynchronizer(line, Third(), pool=fleet)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="is not there"):
        sync.push()
    assert (line.pushes, sync.version) == (1, None)


def test_rounds_and_evaluations_begin_without_prefixes(tmp_path: Path, model_dir: Callable[[str], Path]):
    data = tmp_path / "prompts.jsonl"
    line = json.dumps({"prompt": "a beginning of more than sixteen tokens", "label": "a"})
    data.write_text(f"{line}\n" * 3)
    settings = load_settings(None, {
        "model.path": str(model_dir("llama")), "rollout.data": [str(data)], "eval.data": {"small": str(data)},
        "score.rm_type": "random", "rollout.apply_chat_template": False, "rollout.max_response_len": 4,
        "rollout.n_samples_per_prompt": 2, "run.rollout_batch_size": 1, "run.num_rollout": 2,
    })  # fmt: skip
    worker = RolloutWorker(settings, model_dir("llama"))
    worker.load_weights(HFCheckpoint().read(model_dir("llama")), version="0")
    kept = []
    engine_forgets = worker.engine.forget_prefixes
    worker.engine.forget_prefixes = lambda: (kept.append(worker.engine.prefix_cache_bytes > 0), engine_forgets())
    samples, _ = worker.evaluation("small", 0)
    assert worker.engine.prefix_cache_bytes == 0
    for batch in worker.rounds(SamplerState()):
        samples += batch.samples
        assert worker.engine.prefix_cache_bytes == 0
    assert kept == [True] * 3  # there was something to forget
    assert {sample.prefix_cache_info["cached_tokens"] > 0 for sample in samples} == {False, True}  # siblings' alone
    worker.close()
