"""The side of a run that samples: engine, tokenizer, reward and agent in one place, here or in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl import wiring
from slimectl.ports import Executor, Policy
from slimectl.settings import Settings
from slimectl.stages.evaluate import evaluate, summarized
from slimectl.stages.run import sampled_rounds
from slimectl.types import Metrics, Prompt, Round, Sample

if TYPE_CHECKING:
    from torch import Tensor


class Sampler:
    """Makes rounds and evaluations with the weights that the engine has.

    `addresses` is where requests go (a router, or the servers, which are `workers`); without any, an engine lives here
    and takes its weights by `load_weights`.
    """

    def __init__(
        self, settings: Settings, model: Path, *, addresses: Sequence[str] = (), workers: Sequence[str] = ()
    ) -> None:
        self.settings = settings
        self.tokenizer = wiring.tokenizer(model)
        self.reward = wiring.reward(settings)
        self.agent = wiring.agent(settings)
        self.graders = wiring.graders()
        if addresses:
            self.engine: Any = wiring.client(settings, model, addresses, workers)
        else:
            self.engine = wiring.engine(settings, model, self.tokenizer, load=False)

    def rounds(self, start: int) -> Iterator[Round]:
        """Scored rounds, from the prompt at position `start` of the run on."""
        return sampled_rounds(
            self._prompts(start),
            self.engine,
            self.tokenizer,
            self.reward,
            self.settings,
            executor=self.graders,
            agent=self.agent,
        )

    def _prompts(self, start: int) -> Iterator[Prompt]:
        run = self.settings.run
        epochs = None if run.num_rollout else run.num_epoch or 1
        coming = wiring.prompts(self.settings, list(self.settings.rollout.data), epochs=epochs, start=start)
        return coming if run.num_rollout is None else islice(coming, run.num_rollout * run.rollout_batch_size - start)

    def evaluation(self, name: str, source: str) -> tuple[list[Sample], Metrics]:
        """Every prompt of a held-out dataset, sampled and graded, and the summary."""
        return self._evaluated(name, wiring.prompts(self.settings, [source], shuffle=False), self.settings)

    def accuracy(self, sources: Sequence[str], count: int) -> float:
        """The share of right answers to the first `count` prompts, one answer each."""
        once = self.settings.eval.model_copy(update={"n_samples_per_prompt": 1})
        prompts = islice(wiring.prompts(self.settings, list(sources)), count)
        _, metrics = self._evaluated("warmup", prompts, self.settings.model_copy(update={"eval": once}))
        return metrics["eval/warmup_accuracy"]

    def _evaluated(self, name: str, prompts: Iterator[Prompt], settings: Settings) -> tuple[list[Sample], Metrics]:
        metrics: Metrics = {}
        found = evaluate(
            prompts, self.engine, self.tokenizer, self.reward, settings, executor=self.graders, agent=self.agent
        )
        return list(summarized(name, found, metrics, settings)), metrics

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: str) -> None:
        """New weights for an engine that lives here."""
        self.engine.load_weights(tensors, version=version)

    def set_urls(self, addresses: list[str], workers: list[str]) -> None:
        """Where the servers are now: one of them was restarted."""
        self.engine.set_urls(addresses, workers)

    def close(self) -> None:
        """End the grading processes."""
        self.graders.close()


class VersionedSync:
    """Pushes a policy's weights, and knows which version the engines have."""

    def __init__(self, transport: wiring.Transport, policy: Policy) -> None:
        self.version: str | None = None
        self._transport = transport
        self._policy = policy
        self._turn = threading.RLock()

    def push(self) -> Metrics:
        """Every engine has the policy's weights when this returns."""
        with self._turn:
            told = self._transport.push()
            self.version = self._policy.weight_version
            return told

    def restore(self, url: str) -> None:
        """Give a restarted server the weights that the others have, or newer ones."""
        with self._turn:
            self._transport.push_to(url)

    def close(self) -> None:
        self._transport.close()


class SamplingSide:
    """Where a run samples: the servers, if there are any, and the Sampler in front of them, wherever they live."""

    def __init__(self, settings: Settings, model: Path, *, executor: Executor, folder: Path) -> None:
        self._settings = settings
        self._model = model
        self._folder = folder
        self._sync: VersionedSync | None = None
        self.fleet = wiring.fleet(settings, model, executor=executor, folder=folder)
        try:
            addresses = self.fleet.addresses if self.fleet else list(settings.engine.url)
            build = partial(Sampler, settings, model, addresses=addresses, workers=self.workers)
            self.sampler = executor.host(build, name="sampler", gpus=0.0 if addresses else wiring.engine_gpus(settings))
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> list[str]:
        """The servers that hold weights, by URL; none where the engine lives with the sampler."""
        return list(self.fleet.urls) if self.fleet else list(self._settings.engine.url)

    def sync(self, policy: Policy) -> VersionedSync:
        """How this policy's weights get to the engines from now on."""
        receiver = self.sampler
        transport = wiring.transport(self._settings, policy, receiver)
        self._sync = VersionedSync(transport, policy)
        if self.fleet:
            self.fleet.watch(announce=self.sampler.set_urls, restore=self._sync.restore)
        return self._sync

    def close(self) -> None:
        if self.fleet:
            self.fleet.close()
