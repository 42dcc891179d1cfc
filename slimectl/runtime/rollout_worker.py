"""Sampling side of a run: engine, tokenizer, reward and agent, in this process or a separate one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.data.io import is_pipe
from slimectl.hooks.user_hooks import UserHooks
from slimectl.protocols import NO_PROGRESS, Executor, Policy, Progress
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.stages.evaluate import HeldOutDataset
from slimectl.stages.prompt_groups import PromptSource, UserDataSource, source_length
from slimectl.stages.rounds import sampled_rounds
from slimectl.stages.whole_rounds import GroupSource
from slimectl.system.event_loop import run_coroutine
from slimectl.system.timeline import Span, timeline
from slimectl.types import Metrics, Prompt, RolloutBatch, Sample, SamplerState

if TYPE_CHECKING:
    from torch import Tensor

    from slimectl.engines.supervisor.control import EngineControl
    from slimectl.engines.supervisor.server_pool import ServerPool
    from slimectl.engines.weight_sync.base import WeightSyncBase, WeightSynchronizer


class RolloutWorker:
    """Samples rounds and evaluations with the engine's current weights.

    Requests go to `addresses`: a router, or the servers themselves, which are `workers`. Without addresses, the engine
    is embedded and gets its weights through `load_weights`.
    """

    def __init__(
        self, settings: Settings, model: Path, *, addresses: Sequence[str] = (), workers: Sequence[str] = ()
    ) -> None:
        self._sends_spans = not timeline.enabled and settings.track.timeline
        """Whether the timeline of this process is not the run's."""
        if self._sends_spans:
            timeline.start()
        self.tokenizer = builders.tokenizer(model)
        if addresses:
            self.engine: Any = builders.client(settings, model, self.tokenizer, addresses, workers)
        else:
            self.engine = builders.engine(settings, model, self.tokenizer, load=False)
        self.settings = settings = builders.hook_settings(settings, self.engine, model)
        self.reward = builders.reward(settings)
        self.generator = builders.generator(settings, self.engine, self.tokenizer)
        self.source = builders.data_source(settings)
        self._datasets: dict[str, HeldOutDataset] = {}
        self.graders = builders.LocalExecutor()
        self.progress: Progress = NO_PROGRESS
        """Receives the progress of a round. Not used in a separate process or thread."""

    def rounds(self, state: SamplerState) -> Iterator[RolloutBatch]:
        """Yield scored rounds, continuing from `state`."""
        rounds = sampled_rounds(
            self._groups(state.snapshot()), self.reward, self.settings, executor=self.graders, progress=self.progress
        )
        return self._separate(rounds)

    def _groups(self, state: SamplerState) -> GroupSource:
        """Return the groups of rollout.data, or of the user's source, for a number of epochs or without end."""
        run, data = self.settings.run, list(self.settings.rollout.data)
        epochs = None if run.num_rollout else run.num_epoch or 1
        if self.source is not None:
            last = None if epochs is None else epochs * source_length(self.source)
            return UserDataSource(self.source, self.generator, state, max_groups=last)
        count = None if any(map(is_pipe, data)) else self._count
        if self.settings.rollout.uses_pools:
            prompts, pools = builders.pooled_prompts(self.settings, state, epochs=epochs)
            return PromptSource(prompts, self.generator, state, count=count, pools=pools)
        prompts = builders.prompts(self.settings, data, epochs=epochs, start=state.position)
        return PromptSource(prompts, self.generator, state, count=count)

    def _separate(self, rounds: Iterator[RolloutBatch]) -> Iterator[RolloutBatch]:
        """Yield the rounds, each without cached prefixes of the previous one."""
        for batch in rounds:
            self._forget_prefixes()
            batch.spans = self.take_spans()
            yield batch

    def take_spans(self) -> list[Span]:
        """Return the new spans of this process, if the run cannot take them itself."""
        return timeline.take() if self._sends_spans else []

    def _forget_prefixes(self) -> None:
        """Empty the prefix cache of an engine in this process, so that a resumed run equals an uninterrupted one.

        The last digits of a prompt's results depend on how much of it is computed.
        """
        if forget := getattr(self.engine, "forget_prefixes", None):
            forget()

    def _count(self) -> int:
        """Return the number of prompts per epoch."""
        return sum(1 for _ in builders.prompts(self.settings, list(self.settings.rollout.data), shuffle=False))

    def evaluation(self, name: str, rollout_id: int) -> tuple[list[Sample], Metrics]:
        """Sample and grade a held-out dataset after round `rollout_id`. Return its samples and metrics."""
        if name not in self._datasets:
            self._datasets[name] = builders.dataset(self.settings, name)
        settings = self._datasets[name].settings
        prompts = builders.prompts(settings, [settings.eval.sources[name]], shuffle=False)
        return self._evaluate(self._datasets[name], prompts, rollout_id)

    def accuracy(self, sources: Sequence[str], count: int) -> float:
        """Return the share of correct responses to the first `count` prompts, with one response each."""
        eval_settings = self.settings.eval.model_copy(update={"n_samples_per_prompt": 1})
        prompts = islice(builders.prompts(self.settings, list(sources)), count)
        # This needs single responses, even if a user's function samples the rounds.
        rollout_settings = self.settings.rollout.model_copy(update={"function_path": None})
        settings = self.settings.model_copy(update={"eval": eval_settings, "rollout": rollout_settings})
        warmup = HeldOutDataset("warmup", settings, self.reward, self.generator.agent, UserHooks(settings))
        return self._evaluate(warmup, prompts)[1]["eval/warmup_accuracy"]

    def _evaluate(
        self, dataset: HeldOutDataset, prompts: Iterator[Prompt], rollout_id: int = 0
    ) -> tuple[list[Sample], Metrics]:
        metrics: Metrics = {}
        samples = dataset.evaluate(prompts, self.generator, metrics, executor=self.graders, rollout_id=rollout_id)
        summed = list(samples)
        self._forget_prefixes()
        return summed, metrics

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: str) -> None:
        """Load new weights into the embedded engine."""
        self.engine.load_weights(tensors, version=version)

    def set_urls(
        self, addresses: Sequence[str], workers: Sequence[str], leaving: Sequence[str], numbers: Mapping[str, int]
    ) -> None:
        """Set the addresses of the servers after one of them joined, left, died or was restarted."""
        self.engine.set_urls(addresses, workers, leaving, numbers)

    def in_flight(self) -> dict[str, int]:
        """Return the number of requests in flight by address."""
        requests: dict[str, int] = self.engine.in_flight()
        return requests

    def fail(self, error: BaseException) -> None:
        """Fail all pending requests with this error, because no server will be restarted."""
        self.engine.fail(error)

    def close(self) -> None:
        """Stop the grading processes and close the connections to servers."""
        self.graders.close()
        run_coroutine(self.engine.close())


class RolloutService:
    """Starts and owns the sampling side of a run: the servers, if any, and the RolloutWorker."""

    def __init__(self, settings: Settings, model: Path, *, executor: Executor, folder: Path) -> None:
        settings = builders.keyed(settings)
        self._settings, self._model, self._folder = settings, model, folder
        self._companions, sampler_settings = builders.auxiliary_servers(
            settings, model, executor=executor, folder=folder
        )
        self._pool: ServerPool | None = None
        self._asleep = False
        self._control: EngineControl | None = None
        try:
            self._pool = builders.server_pool(settings, model, executor=executor, folder=folder)
            urls = builders.urls(settings.engine)
            addresses, workers = (self._pool.addresses, self._pool.urls) if self._pool else (urls, urls)
            self._workers = builders.workers(settings, workers) if workers else None
            build = partial(RolloutWorker, sampler_settings, model, addresses=addresses, workers=workers)
            gpus = 0.0 if workers else builders.engine_gpus(settings.engine)
            self.sampler = executor.host(build, name="sampler", gpus=gpus)
        except BaseException:
            self.close()
            raise

    def report_to(self, progress: Progress) -> None:
        """Let the sampler report its progress, if it samples in the thread that waits for the round."""
        if isinstance(self.sampler, RolloutWorker) and not self._settings.run.async_level:
            self.sampler.progress = progress

    def sleep(self) -> None:
        """Release the memory of servers on the trainer's GPUs, so that the models can be loaded there."""
        if self._workers is not None:
            if self._pool is not None:
                self._pool.rest(True)
            self._workers.sleep()
            self._asleep = True

    def sync(self, policy: Policy) -> WeightSynchronizer:
        """Return the synchronizer that pushes this policy's weights to the engines."""
        if self._workers is None:
            # A sampler in another process is a proxy that forwards the weights.
            receiver = self.sampler.engine if isinstance(self.sampler, RolloutWorker) else self.sampler
            return builders.WeightSynchronizer(builders.InProcessSync(policy, receiver), policy)
        rank_of = self._pool.rank_of if self._pool is not None else None
        transport = builders.to_servers(
            self._settings, policy, self._workers, model=self._model, folder=self._folder, rank_of=rank_of
        )
        if self._pool is not None:
            # A new or restarted server gets the weights of the other servers, or newer ones, before any request.
            self._pool.restore = partial(self._restore, transport)
            self._pool.announce, self._pool.failed = self._announce, self.sampler.fail
            self._pool.in_flight = self._in_flight
            if isinstance(self.sampler, RolloutWorker):  # in this process: it can report a failed server at once
                self.sampler.engine.troubled = self._pool.look
            self._pool.announce_change()  # what happened while the models were built
            self._control = builders.engine_control(self._settings, self._model, self._folder, self._pool, transport)
            self._control.start()
        return builders.WeightSynchronizer(transport, policy, pool=self._pool, asleep=self._asleep)

    @property
    def engines(self) -> int | None:
        """Number of servers that respond. None if the engine is no server."""
        return None if self._pool is None else len(self._pool.urls)

    def _restore(self, transport: WeightSyncBase, url: str) -> str:
        """Push the policy's weights to one server, and return their version."""
        workers = builders.workers(self._settings, [url])
        while True:
            version = transport.policy.weight_version
            transport.push_to(workers)
            if transport.policy.weight_version == version:
                return version

    def _announce(
        self, addresses: Sequence[str], workers: Sequence[str], leaving: Sequence[str], numbers: Mapping[str, int]
    ) -> None:
        assert self._workers is not None
        self._workers.set_urls(workers)
        self.sampler.set_urls(addresses, workers, leaving, numbers)

    def _in_flight(self, urls: Sequence[str]) -> Mapping[str, int]:
        """Return the number of requests at each server. A router does not report them, but its servers do."""
        assert self._pool is not None
        if self._pool.is_routed:
            return builders.workers(self._settings, urls).loads()
        requests: Mapping[str, int] = self.sampler.in_flight()
        return requests

    def close(self) -> None:
        """Stop the servers that were started here."""
        if self._control is not None:
            self._control.close()
        for pool in [*self._companions, *([self._pool] if self._pool is not None else [])]:
            pool.close()
