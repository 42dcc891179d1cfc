"""Every verifier as hostile responses try it: on a sample that it can grade, on the clock."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any

from aiohttp import web
from graders import grading
from hostile import replies
from test_instructions import IFBENCH, IFEVAL

from slimectl.errors import BackendError
from slimectl.rewards import Verifier, known_types, verifier, weighted
from slimectl.rewards.judge import Judge
from slimectl.rewards.remote import RemoteRm
from slimectl.rewards.rubric import Rubric
from slimectl.system.client import run_sync
from slimectl.types import Sample

TIMEOUT_S = 5.0
"""score.timeout_s for one verifier, here in seconds of CPU: the machine's other work is not its."""

STUCK_S = 60.0
"""After which a worker is killed; wall clock."""

CHOICES = ["5", "42", "x", "yes"]
OPTIONS: dict[str, dict[str, object]] = {
    "by_column": {"column": "choices", "types": {"*": "math"}},
    "length_penalty": {"limit": 100},
    "overlong": {"limit": 100, "buffer": 50},
    "regex": {"pattern": r"Answer:\s*(.*)"},
}
APART = ("code", "ifbench", "ifeval", "judge", "random", "reasoning_gym", "remote_rm", "reward_model",
         "rubric")  # fmt: skip
"""Those that want metadata, or a server, of their own."""

NAMES = [prefix + name for name in known_types() if name not in APART for prefix in ("", "boxed_")]
VERIFIERS: dict[str, Verifier] = {
    **{name: verifier(name, **OPTIONS.get(name.removeprefix("boxed_"), {})) for name in NAMES},
    "sum": weighted([{"type": "math"}, {"type": "repetition", "weight": -0.5}, {"type": "dapo", "name": "d"}]),
    "pattern in the label": verifier("regex"),
}
JUDGES = [
    Judge(url="http://127.0.0.1:1/v1"),
    Judge(url="http://127.0.0.1:1/v1", pattern=r"\[\[(.*?)\]\]", values={"A": 1.0, "5": 0.5}),
    Judge(url="http://127.0.0.1:1/v1", pattern=r'"score":\s*(\S+)', low=-1.0, high=1.0),
]
TASKS_AT_ONCE = 2
"""Of some hundred tasks of reasoning-gym that one response is an answer to."""


def sample_of(response: str, label: str | int, **metadata: object) -> Sample:
    tokens = list(range(len(response) % 200))
    return Sample(response=response, label=label, tokens=tokens, response_length=len(tokens), metadata=metadata)


def label_for(name: str, label: str) -> str | int:
    plain = name.removeprefix("boxed_")
    return {"gpqa": 1, "numeric": "5", "pattern in the label": "x+"}.get(plain, label)


def graded(given: Verifier, sample: Sample) -> float:
    """The number that a verifier gives; asserts what every verdict promises."""
    verdict = given.explain(sample)
    number = verdict.reward["score"] if isinstance(verdict.reward, dict) else verdict.reward
    assert isinstance(number, float)
    assert math.isfinite(number)
    assert given.bounds[0] - 1e-9 <= number <= given.bounds[1] + 1e-9
    assert verdict.span is None or sample.response[slice(*verdict.span)] == verdict.extracted
    assert "\n" not in verdict.why
    return number


def by_rule(name: str, response: str, label: str) -> None:
    graded(VERIFIERS[name], sample_of(response, label_for(name, label), choices=CHOICES))


def by_instructions(rm_type: str, response: str) -> None:
    """All instructions of the benchmark at once; loosely, which takes eight times as long, for one in eight."""
    cases = IFEVAL if rm_type == "ifeval" else IFBENCH
    metadata = {"instruction_id_list": [case[0] for case in cases], "kwargs": [case[1] for case in cases]}
    mode = "strict" if len(response) % 8 else "loose"
    graded(verifier(rm_type, mode=mode), sample_of(response, "", **metadata))


def by_tasks(response: str) -> None:
    """Some tasks of reasoning-gym, drawn by the response."""
    for name in Random(response.encode("utf-8", "surrogatepass")).sample(tasks(), TASKS_AT_ONCE):
        graded(verifier("reasoning_gym"), sample_of(response, "6", source_dataset=name, entry=entry_of(name)))


@cache
def tasks() -> list[str]:
    """Every task but the one that is made of others."""
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


@cache
def entry_of(name: str) -> dict[str, Any]:
    """An entry of a task, as it comes from a file."""
    import reasoning_gym

    return dict(json.loads(json.dumps(reasoning_gym.create_dataset(name, seed=1, size=1)[0], default=str)))


def by_judges(reply: str) -> None:
    for judge in JUDGES:
        reward = judge.read(reply)
        assert reward is None or judge.bounds[0] <= reward <= judge.bounds[1]


def by_extraction(response: str) -> None:
    """What `code` would run."""
    for text in (response, f"```python\n{response}\n```"):
        extracted = verifier("code").extract(sample_of(text, ""))
        assert extracted is None or extracted in text


TRIALS: dict[str, Callable[[str, str], None]] = {
    **{name: lambda response, label, name=name: by_rule(name, response, label) for name in VERIFIERS},
    "ifeval": lambda response, label: by_instructions("ifeval", response),
    "ifbench": lambda response, label: by_instructions("ifbench", response),
    "reasoning_gym": lambda response, label: by_tasks(response),
    "judge": lambda response, label: by_judges(response),
    "code": lambda response, label: by_extraction(response),
}


def tried(pair: tuple[str, str], *, without: str = "") -> dict[str, float]:
    """Seconds of CPU that each verifier took for one (response, label). Raises AssertionError where one raised."""
    seconds = {}
    for name, trial in TRIALS.items():
        if name == without:
            continue
        started = time.process_time()
        try:
            trial(*pair)
        except Exception as error:
            raise AssertionError(f"{name} raised {type(error).__name__}: {error} for {pair!r}"[:2000]) from error
        seconds[name] = time.process_time() - started
    return seconds


def ran(pair: tuple[str, str]) -> dict[str, float]:
    """Seconds, by the clock, that running the response as a program took."""
    started = time.perf_counter()
    program = f"```python\n{pair[0]}\n```"
    graded(verifier("code", test_timeout_s=1.0), sample_of(program, "", tests=[{"input": "", "output": "1\n"}]))
    return {"code, run": time.perf_counter() - started}


def answered(count: int, seed: int) -> Iterator[tuple[tuple[str, str], dict[str, float] | Exception]]:
    """Each thing that a server may say, with the seconds of CPU that judge and remote_rm took over it.

    An answer that is no reward is a BackendError; anything else that is raised is a fault.
    """
    given = iter(replies(4 * count, seed))

    def garbage(body: object) -> web.Response:
        status, text = next(given)
        return web.Response(status=status, body=text.encode("utf-8", "surrogatepass"), content_type="application/json")

    samples = [sample_of("x", "5") for _ in range(3)]
    with grading(garbage) as server:
        once: dict[str, Any] = {"url": server.url, "max_retries": 0, "timeout_s": 5.0}
        rubrics = [(f"rubric {mode}", Rubric(**once, criteria=["a"], mode=mode)) for mode in ("each", "together")]
        for name, asks in (("judge", Judge(**once)), ("remote_rm", RemoteRm(**once)), *rubrics):
            for number in range(count):
                some = samples[: 1 if name != "remote_rm" or number % 2 else 3]
                started = time.process_time()
                try:
                    for verdict in run_sync(lambda asker, asks=asks, some=some: asks.grade_async(some, asker)):
                        assert isinstance(verdict.reward, dict) or math.isfinite(verdict.reward)
                        assert "\n" not in verdict.why
                except BackendError:
                    pass
                except Exception as error:
                    yield (f"{name}, reply {number} of seed {seed}", ""), error
                    continue
                yield (f"reply {number}", ""), {f"{name}, asked": time.process_time() - started}


def warm_up(_: object) -> None:
    """Import mpmath off the clock."""
    tried((r"\boxed{2x}", "x+x"), without="reasoning_gym")


def warm_up_tasks(_: object) -> None:
    """Besides it reasoning-gym, with an entry of each task."""
    warm_up(_)
    for name in tasks():
        entry_of(name)
