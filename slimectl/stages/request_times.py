"""Times of a round's requests to engines: spans of the timeline, perf/request metrics, and the slowest engine."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from slimectl.system.timeline import Span, span, timeline
from slimectl.types import EngineTimes, Metrics

PARTS = ("queue", "prefill", "decode")
"""Parts of a request's time, in order. Their sum is the time from its start to its end."""


class EngineRequest(NamedTuple):
    """A finished request for a response of a sample. Times are those of `time.perf_counter`."""

    rollout_id: int | None
    """Round that was being sampled when it ended."""
    group: int
    sample: int
    """Index of the sample."""
    prompt_tokens: int
    tokens: int
    """Number of tokens of the response."""
    start: float
    end: float
    times: EngineTimes | None

    @property
    def parts(self) -> tuple[float, ...]:
        """The seconds of PARTS, or nothing if the engine reports no times."""
        if self.times is None:
            return ()
        return self.times.admitted - self.start, self.times.first_token - self.times.admitted, self.end - self.times[1]


def take_requests(requests: list[EngineRequest], limit: int, **fields: object) -> Metrics:
    """Empty a list of requests into the timeline, at most `limit` of them. Return the metrics of all."""
    finished, requests[:] = list(requests), []
    timeline.add(request_span | fields for request_span in request_spans(kept_requests(finished, limit)))
    return request_metrics(finished)


def request_metrics(requests: Sequence[EngineRequest]) -> Metrics:
    """Return the distributions of the requests' times and rates, and how much slower the slowest engine is."""
    if not requests:
        return {}
    metrics: Metrics = {"perf/request/count": float(len(requests))}
    parts = zip(*(request.parts for request in requests if request.times is not None), strict=True)
    columns = {f"{name}_time": list(column) for name, column in zip(PARTS, parts, strict=False)}
    columns["e2e_time"] = [request.end - request.start for request in requests]
    columns["tokens_per_sec"] = [request.tokens / (request.end - request.start) for request in requests]
    for name, values in columns.items():
        metrics |= {f"perf/request/{name}/{key}": value for key, value in _distribution(values).items()}
    return metrics | _slowest_engine(requests)


def _distribution(values: Iterable[float]) -> Metrics:
    """Return mean, p50, p95 and max. A percentile is the smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    at = {f"p{share}": ordered[math.ceil(share / 100 * len(ordered)) - 1] for share in (50, 95)}
    return {"mean": statistics.fmean(ordered), **at, "max": ordered[-1]}


def _slowest_engine(requests: Iterable[EngineRequest]) -> Metrics:
    """Return the number of the engine with the longest decode time per token, and its ratio to the median engine."""
    seconds: defaultdict[int, float] = defaultdict(float)
    tokens: defaultdict[int, int] = defaultdict(int)
    for request in requests:
        if request.times is not None:
            seconds[request.times.engine] += request.end - request.times.first_token
            tokens[request.times.engine] += request.tokens
    return slowest("engine", {engine: seconds[engine] / count for engine, count in tokens.items() if count})


def slowest(kind: str, times: Mapping[int, float]) -> Metrics:
    """Return the slowest of several engines or ranks by number, and its time divided by the (lower) median.

    >>> slowest("rank", {0: 1.0, 1: 1.5, 2: 3.0})
    {'perf/slowest_rank': 2.0, 'perf/slowest_rank_ratio': 2.0}
    """
    median = statistics.median_low(times.values()) if len(times) > 1 else 0.0
    if not median:
        return {}
    number = max(times, key=lambda key: times[key])
    return {f"perf/slowest_{kind}": float(number), f"perf/slowest_{kind}_ratio": times[number] / median}


def kept_requests(requests: Sequence[EngineRequest], limit: int) -> list[list[EngineRequest]]:
    """Return the requests of evenly spaced samples, at most `limit` of them, by sample.

    The sample of the longest request is always among them, so that a straggler is seen.
    """
    by_sample: defaultdict[tuple[int, int], list[EngineRequest]] = defaultdict(list)
    for request in requests:
        by_sample[request.group, request.sample].append(request)
    samples = list(by_sample.values())
    if len(requests) <= limit:
        return samples
    longest = max(samples, key=lambda sample: max(request.end - request.start for request in sample))
    selection, room = [longest[:limit]], limit - len(longest)
    count = max(1, len(samples) * limit // len(requests))
    for sample in (samples[place * len(samples) // count] for place in range(count)):
        if sample is not longest and len(sample) <= room:
            selection.append(sample)
            room -= len(sample)
    return selection


def request_spans(samples: Iterable[Sequence[EngineRequest]]) -> Iterator[Span]:
    """Yield the spans of requests, which are turns of their samples, and of the tools between two turns."""
    for requests in samples:
        for before, after in pairwise(requests):
            if after.start > before.end:
                yield span("tools", "tool", before.end, after.start, **_place(before))
        for turn, request in enumerate(requests):
            fields = {"turn": turn, "prompt_tokens": request.prompt_tokens, "tokens": request.tokens}
            parts = {name: round(seconds, 6) for name, seconds in zip(PARTS, request.parts, strict=False)}
            lane = f"engine/{request.times.engine if request.times else 0}"
            yield span(lane, "request", request.start, request.end, **_place(request), **fields, **parts)


def _place(request: EngineRequest) -> dict[str, int]:
    round_number = {} if request.rollout_id is None else {"round": request.rollout_id}
    return round_number | {"group": request.group, "index": request.sample}
