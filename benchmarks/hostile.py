"""Every verifier against responses that try to break or stall it: does one raise, or take longer than it may?

    python benchmarks/hostile.py --count 100000
    python benchmarks/hostile.py --count 2000 --programs 200 --answers 500

The corpus is that of the tests (tests/rewards/hostile.py): LaTeX that explodes or is broken, markup, signs of all
scripts, what regular expressions go wrong at, very long texts, all of it nested, cut and put together anew; besides,
texts that hypothesis draws. Each response goes to every verifier: to ifeval and ifbench with all their kinds at once,
to reasoning-gym as the answer to two of its tasks. `code` runs --programs of them; judge and remote_rm get --answers of
a server that are none.

Shown are CPU milliseconds a response, on average and at most. The exit code is 1 if anything raised, or took longer
than score.timeout_s allows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "rewards"))

from hostile import EXPLOSIVE, LABELS, LONG, MARKUP, SIGNS, drawn, responses
from trials import STUCK_S, TIMEOUT_S, answered, ran, tried, warm_up_tasks

from slimectl.executors.local import LocalExecutor

Pair = tuple[str, str]


def pairs(count: int, seed: int) -> Iterator[Pair]:
    """The whole corpus, a tenth of `count` that hypothesis draws, and compositions up to `count`."""
    made: list[Pair] = [(text, "5") for text in MARKUP + SIGNS + LONG]
    made += [(f"\\boxed{{{text}}}", label) for text in EXPLOSIVE + LONG for label in (LABELS[0], text)]
    made += [(text, "5") for text in drawn(count // 10)]
    yield from made[:count]
    yield from responses(max(0, count - len(made)), seed)


class Figures:
    """Mean and worst of each verifier, and what went wrong."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.worst: defaultdict[str, tuple[float, str]] = defaultdict(lambda: (0.0, ""))
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.faults: list[str] = []

    def add(self, pair: Pair, result: dict[str, float] | BaseException) -> None:
        if isinstance(result, BaseException):
            self.blame(f"{result!r} for {pair!r}")
            return
        for name, seconds in result.items():
            self.sums[name] += seconds
            self.counts[name] += 1
            self.worst[name] = max(self.worst[name], (seconds, pair[0]))
            if seconds > TIMEOUT_S:
                self.blame(f"{name} took {seconds:.1f} s for {pair!r}")

    def blame(self, fault: str) -> None:
        self.faults.append(fault)
        print(fault[:1000], file=sys.stderr, flush=True)

    def show(self) -> None:
        print(f"{'verifier':>24} {'responses':>10} {'mean ms':>9} {'most ms':>9}")
        for name in sorted(self.sums, key=lambda name: -self.worst[name][0]):
            seconds, text = self.worst[name]
            mean = 1e3 * self.sums[name] / self.counts[name]
            print(f"{name:>24} {self.counts[name]:>10} {mean:9.3f} {1e3 * seconds:9.1f}  {text[:40]!r}")


def collect(
    figures: Figures,
    fn: Callable[[Pair], dict[str, float]],
    given: Iterable[Pair],
    executor: LocalExecutor,
    workers: int,
) -> None:
    taken: list[Pair] = []

    def noted() -> Iterator[Pair]:
        for pair in given:
            taken.append(pair)
            yield pair

    started = time.perf_counter()
    for at, result in enumerate(executor.map(fn, noted(), workers=workers, timeout_s=STUCK_S)):
        figures.add(taken[at], result)
        if (at + 1) % 5000 == 0:
            print(f"{at + 1} in {time.perf_counter() - started:.0f} s, {len(figures.faults)} faults", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="responses to every verifier")
    parser.add_argument("--programs", type=int, default=1000, help="responses that code runs")
    parser.add_argument("--answers", type=int, default=5000, help="garbled answers of a server to judge and remote_rm")
    parser.add_argument("--seed", type=int, default=1, help="of the compositions")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    given = parser.parse_args()
    figures, executor = Figures(), LocalExecutor()
    try:
        list(executor.map(warm_up_tasks, range(4 * given.workers), workers=given.workers))
        collect(figures, tried, pairs(given.count, given.seed), executor=executor, workers=given.workers)
        collect(figures, ran, responses(given.programs, given.seed + 1), executor=executor, workers=given.workers)
    finally:
        executor.close()
    for pair, result in answered(given.answers, given.seed + 2):
        figures.add(pair, result)
    figures.show()
    print(f"{len(figures.faults)} raised or took too long")
    raise SystemExit(bool(figures.faults))


if __name__ == "__main__":
    main()
