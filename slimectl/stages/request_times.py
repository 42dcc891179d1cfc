"""Times of a round's requests to engines: spans of the timeline, perf/request metrics, and the slowest engine."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import sub, truediv
from typing import Any, NamedTuple

from slimectl.system.timeline import Span, span, timeline
from slimectl.types import EngineTimes, Metrics

PARTS = ("queue", "prefill", "decode")
"""Parts of a request's time, in order. Their sum is the time from its start to its end."""


class EngineRequest(NamedTuple):
    """A finished request for a response of a sample. Times come from `time.perf_counter`."""

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


def take_requests(requests: list[tuple[Any, ...]], limit: int, **fields: object) -> Metrics:
    """Empty a list of requests into the timeline, at most `limit` of them. Return the metrics of all.

    A request is a tuple with the values of an EngineRequest, which is made only for kept requests, for speed.
    """
    finished, requests[:] = list(requests), []
    spans = list(request_spans(kept_requests(finished, limit)))
    for request_span in spans if fields else ():
        request_span |= fields
    timeline.add(spans)
    return request_metrics(finished)


def request_metrics(requests: Sequence[tuple[Any, ...]]) -> Metrics:
    """Return the distributions of the requests' times and rates, and how much slower the slowest engine is."""
    if not requests:
        return {}
    _, _, _, _, tokens, starts, ends, times = zip(*requests, strict=True)
    seconds = list(map(sub, ends, starts))
    columns = {"e2e_time": seconds, "tokens_per_sec": list(map(truediv, tokens, seconds))}
    metrics: Metrics = {"perf/request/count": float(len(requests))}
    if all(times):
        admitted, first_tokens, engines = zip(*times, strict=True)
        moments = (starts, admitted, first_tokens, ends)
        for part, (earlier, later) in zip(PARTS, pairwise(moments), strict=True):
            columns[f"{part}_time"] = list(map(sub, later, earlier))
        metrics |= _slowest_engine(engines, map(sub, ends, first_tokens), tokens)
    for name, values in columns.items():
        metrics |= {f"perf/request/{name}/{key}": value for key, value in _distribution(values).items()}
    return metrics


def _distribution(values: Iterable[float]) -> Metrics:
    """Return mean, p50, p95 and max. A percentile is the smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    at = {f"p{share}": ordered[math.ceil(share / 100 * len(ordered)) - 1] for share in (50, 95)}
    return {"mean": math.fsum(ordered) / len(ordered), **at, "max": ordered[-1]}


def _slowest_engine(engines: Sequence[int], decode_s: Iterable[float], tokens: Sequence[int]) -> Metrics:
    """Return the number of the engine with the longest decode time per token, and its ratio to the median engine."""
    if len(set(engines)) == 1:
        return {}
    seconds: defaultdict[int, float] = defaultdict(float)
    counts: defaultdict[int, int] = defaultdict(int)
    for engine, engine_s, count in zip(engines, decode_s, tokens, strict=True):
        seconds[engine] += engine_s
        counts[engine] += count
    return slowest("engine", {engine: seconds[engine] / count for engine, count in counts.items() if count})


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


def kept_requests(requests: Sequence[tuple[Any, ...]], limit: int) -> list[list[EngineRequest]]:
    """Return the requests of evenly spaced samples, at most `limit` of them, by sample.

    The sample of the longest request is always among them, so that a straggler is seen.
    """
    if not requests:
        return []
    _, groups, indices, _, _, starts, ends, _ = zip(*requests, strict=True)
    owners = list(zip(groups, indices, strict=True))
    places: dict[tuple[int, int], list[int]] = {}
    for place, owner in enumerate(owners):
        places.setdefault(owner, []).append(place)
    samples = list(places.values())
    selection = samples
    if len(requests) > limit:
        seconds = list(map(sub, ends, starts))
        longest = places[owners[seconds.index(max(seconds))]]
        selection, room = [longest[:limit]], limit - len(longest)
        count = max(1, len(samples) * limit // len(requests))
        for sample in (samples[place * len(samples) // count] for place in range(count)):
            if sample is not longest and len(sample) <= room:
                selection.append(sample)
                room -= len(sample)
    return [[EngineRequest._make(requests[place]) for place in sample] for sample in selection]


def request_spans(samples: Iterable[Sequence[EngineRequest]]) -> Iterator[Span]:
    """Yield the spans of requests, which are turns of their samples, and of the tools between two turns."""
    for requests in samples:
        for before, after in pairwise(requests):
            if after.start > before.end:
                yield span("tools", "tool", before.end, after.start, **_place(before))
        for turn, request in enumerate(requests):
            lane = f"engine/{request.times.engine if request.times else 0}"
            request_span = span(lane, "request", request.start, request.end)
            request_span |= _place(request)
            request_span["turn"], request_span["prompt_tokens"], request_span["tokens"] = (
                turn,
                request.prompt_tokens,
                request.tokens,
            )
            for name, seconds in zip(PARTS, request.parts, strict=False):
                request_span[name] = round(seconds, 6)
            yield request_span


def _place(request: EngineRequest) -> dict[str, int | None]:
    return {"round": request.rollout_id, "group": request.group, "index": request.sample}
