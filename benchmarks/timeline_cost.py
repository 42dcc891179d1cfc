"""CPU time of a round with and without the timeline, in turns within one run of the quickstart.

    OMP_NUM_THREADS=1 python benchmarks/timeline_cost.py --rounds 200

Of two neighbouring rounds one records spans, by lot. Their difference is the cost, so that what both share (length of
the responses, load of the machine) cancels out. The quickstart is the worst case: 512 short requests in a quarter of a
second.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time

from slimectl import recipes
from slimectl.runtime.run import TrainingRun
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve
from slimectl.system.timeline import timeline


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipes.find("quickstart", instead=False, needed=True)
        assert recipe.layer is not None
        changes = [f"run.dir={folder}", f"run.num_rollout={rounds}", "eval.interval=none", "run.save_interval=none"]
        settings = resolve([recipe.layer, from_assignments(changes)]).settings
        seconds, lots = [], random.Random(1)
        records = [flag for _ in range(rounds) for flag in lots.choice([(True, False), (False, True)])]
        before = time.process_time()
        for report in TrainingRun(settings).reports():
            now = time.process_time()
            seconds.append(now - before)
            timeline.enabled = records[report.rollout_id]
            before = time.process_time()
    pairs = []
    for first in range(4, len(seconds) - 1, 2):  # the first rounds warm up
        costs = {records[place]: seconds[place] for place in (first, first + 1)}
        pairs.append((costs[True], costs[False]))
    without_s = statistics.median(other for _, other in pairs)
    differences = sorted(one - other for one, other in pairs)
    cut = len(pairs) // 10  # a garbage collection or another process hits a few rounds
    middle = differences[cut : len(pairs) - cut]
    mean, error = statistics.fmean(middle), statistics.stdev(middle) / len(middle) ** 0.5
    print(f"{len(pairs)} pairs of rounds. A round without the timeline takes {1e3 * without_s:.1f} ms (median)")
    print(
        f"The timeline adds {1e3 * mean:.2f} ± {1e3 * error:.2f} ms, {100 * mean / without_s:.2f} % "
        f"(mean without the tenths at both ends), median {1e3 * statistics.median(differences):.2f} ms"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    main(parser.parse_args().rounds)
