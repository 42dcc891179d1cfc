"""Functions of a user's that print, exit, raise, hang on to things or return nonsense, at every hook that takes one.

    python benchmarks/reliability/user_functions.py --seed 1 [--count 150]

An attack is a way to misbehave at a hook. Survived: stdout holds records or nothing else, the exit code is the
documented one, an error is one line that names the function, and no traceback is printed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import warm
from campaign import Campaign

from slimectl.data.jsonl import read_sample
from slimectl.errors import RecordError

TINY = {
    "model_type": "llama", "tie_word_embeddings": True, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip

SCORE = ["score", "samples.jsonl"]
ROLLOUT = ["rollout", "--data", "prompts.jsonl", "--model", "model", "-n", "2", "-s", "rollout.max_response_len=3"]
TRAIN = ["train", "scored.jsonl", "--model", "model", "-s", "train.global_batch_size=8"]
RUN = [
    "run", "--model", "model", "--data", "prompts.jsonl", "-s", "score.rm_type=random", "-s", "run.num_rollout=2",
    "-s", "run.rollout_batch_size=2", "-s", "rollout.n_samples_per_prompt=2", "-s", "rollout.max_response_len=3",
    "-s", "run.save_interval=none", "-s", "run.keep_checkpoints=none", "-s", "eval.data.a=prompts.jsonl",
    "-s", "track.plot=false", "--force", "--name", "a",
]  # fmt: skip


@dataclass(frozen=True)
class HookCase:
    """A hook: its setting, the command that calls it, and a function that is right for it."""

    setting: str
    command: list[str]
    parameters: str
    body: str
    is_async: bool = False
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        kind = "async " if self.is_async else ""
        return f"{kind}{self.setting}({self.parameters}){' '.join(('', *self.options))}"


GROUPED = ("-s", "score.group_rm=true")

HOOKS = [
    HookCase("score.custom_rm_path", SCORE, "sample", "return 1.0"),
    HookCase("score.custom_rm_path", SCORE, "sample", "return 1.0", is_async=True),
    HookCase("score.custom_rm_path", SCORE, "samples", "return [1.0] * len(samples)"),
    HookCase("score.custom_rm_path", SCORE, "samples", "return [1.0] * len(samples)", True, GROUPED),
    HookCase("score.custom_rm_path", SCORE, "sample", "return 1.0", options=("--workers", "1")),
    HookCase(
        "rollout.custom_generate_function_path", ROLLOUT, "sample, sampling_params, generate",
        "answer = await generate(sample.tokens, sampling_params)\n"
        "sample.append_response_tokens(answer.tokens, log_probs=answer.log_probs, text=answer.text)\nreturn sample",
        True,
    ),
    HookCase("rollout.sample_hook_path", ROLLOUT, "sample", "return None"),
    HookCase("rollout.sample_hook_path", ROLLOUT, "sample", "return sample", True),
    HookCase(
        "rollout.function_path", ROLLOUT, "data_source, attempt",
        "return [await attempt(group) for group in data_source.get_samples(1)]", True,
    ),
    HookCase("rollout.data", ["rollout", *ROLLOUT[3:]], "", "return [{'prompt': 'say', 'label': 'a'}]"),
    HookCase("rollout.dynamic_sampling_filter_path", RUN, "samples", "return True"),
    HookCase(
        "rollout.buffer_filter_path", RUN, "buffer, num_samples",
        "groups = buffer[:num_samples]\ndel buffer[:num_samples]\nreturn groups",
        options=("-s", "rollout.over_sampling_batch_size=4"),
    ),
    HookCase("rollout.all_samples_process_path", RUN, "all_samples", "return None"),
    HookCase("rollout.sample_filter_path", TRAIN, "data", "return None"),
    HookCase("rollout.data_postprocess_path", TRAIN, "rollout_data", "return None"),
    HookCase(
        "score.custom_reward_post_process_path", TRAIN, "samples",
        "rewards = [float(i) for i in range(len(samples))]\nreturn rewards, rewards",
    ),
    HookCase(
        "train.custom_convert_samples_to_train_data_path", TRAIN, "samples",
        "return {'tokens': [s.tokens for s in samples], 'response_lengths': [s.response_length for s in samples],\n"
        "        'rewards': [s.reward for s in samples]}",
    ),
    HookCase(
        "train.custom_advantage_function_path", TRAIN, "rollout_data",
        "rollout_data['advantages'] = [[1.0] * n for n in rollout_data['response_lengths']]",
    ),
    HookCase(
        "train.custom_loss_function_path", TRAIN, "log_probs, sum_of_sample_mean",
        "return sum_of_sample_mean(-log_probs), {}",
    ),
    HookCase("train.custom_tis_function_path", TRAIN, "pg_loss, loss_masks", "return pg_loss, loss_masks, {}"),
    HookCase("train.custom_pg_loss_reducer_function_path", TRAIN, "loss_masks", "return lambda losses: losses.sum()"),
    HookCase("track.custom_rollout_log_function_path", RUN, "samples", "return False"),
    HookCase("track.custom_eval_rollout_log_function_path", RUN, "data", "return False"),
]  # fmt: skip

PRINTS = {
    "print": "print('{\"reward\": 1}')",
    "print without end": "print('words', end='')",
    "write to descriptor 1": "os.write(1, b'words\\n')",
    "print from C": "ctypes.CDLL(None).puts(b'words'); ctypes.CDLL(None).fflush(None)",
    "print from a child process": "subprocess.run(['echo', 'words'])",
    "print from a thread": "run_in_thread(lambda: print('words'))",
    "write to the first stdout": "sys.__stdout__.write('words\\n'); sys.__stdout__.flush()",
    "open /dev/stdout": "open('/dev/stdout', 'w').write('words\\n')",
    "log a warning": "logging.basicConfig(stream=sys.stdout, force=True); logging.warning('words')",
    "print at exit": "atexit.register(print, 'words')",
    "redirect stdout": "sys.stdout = open(os.devnull, 'w'); print('words')",
    "print binary": "sys.stdout.buffer.write(b'\\xff\\x00\\n')",
    "read stdin": "sys.stdin.read()",
}
TAKES_AWAY = {
    "delete sys.stdout": "del sys.stdout",
    "close sys.stdout": "sys.stdout.close()",
    "close sys.stderr": "sys.stderr.close(); sys.stderr = None",
    "close descriptor 1": "os.close(1)",
    "change the directory": "os.chdir('/')",
    "change a signal's handler": "in_main_thread() and signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
    "fork a child that ends": "child = os.fork()\nif not child: os._exit(0)\nos.waitpid(child, 0)",
    "fork a child that returns": "child = os.fork()\nif child: os.waitpid(child, 0)",
    "raise in a thread": "run_in_thread(lambda: 1 / 0)",
    "exit a thread": "run_in_thread(sys.exit)",
    "leave a thread": "threading.Thread(target=time.sleep, args=(0.2,)).start()",
    "change the environment": "os.environ.clear()",
    "lower the recursion limit": "sys.setrecursionlimit(max(300, len(traceback.extract_stack()) + 200))",
    "freeze the random seed": "random.seed(0)",
    "collect garbage": "gc.disable(); gc.collect()",
    "turn warnings into errors": "warnings.simplefilter('error')",
}
ENDS = {
    "sys.exit(0)": "sys.exit(0)",
    "sys.exit with words": "sys.exit('words\\nin lines')",
    "exit()": "raise SystemExit",
    "os._exit(0)": "os._exit(0)",
    "os.execv": "os.execv('/bin/true', ['true'])",
    "os.execlp": "os.execlp('true', 'true')",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "GeneratorExit": "raise GeneratorExit",
    "a BaseException": "raise type('Rude', (BaseException,), {})('words')",
    "an exit below `except Exception`": "try:\n    os._exit(0)\nexcept Exception:\n    pass",
    "os._exit in a thread": "run_in_thread(lambda: os._exit(0))",
}
RAISES = {
    "an exception of many lines": "raise ValueError('words\\n' * 500)",
    "an exception that cannot say itself": "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})",
    "an exception that cannot be pickled": "raise ValueError(lambda: 0)",
    "RecursionError": "def f(): return f()\nf()",
    "MemoryError": "raise MemoryError",
    "a large allocation": "bytearray(1 << 62)",
    "StopIteration": "next(iter(()))",
    "a group of exceptions": "raise ExceptionGroup('words', [ValueError(1), TypeError(2)])",
    "a chain of exceptions": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('words') from e",
    "BrokenPipeError": "raise BrokenPipeError(32, 'words')",
    "StorageError's cousin": "raise OSError(28, 'No space left on device')",
    "CancelledError": "raise asyncio.CancelledError",
    "a syntax error at run time": "exec('def')",
    "an assertion": "assert False, 'words'",
}
RETURNS = {
    "a function": "return lambda: 0",
    "an object": "return object()",
    "a module": "return sys",
    "a generator": "return (i for i in range(3))",
    "a text of a megabyte": "return 'x' * 1_000_000",
    "a type that shows badly": "return type('Bad', (), {'__repr__': lambda self: 1 / 0})()",
    "itself": "return sys.modules",
}
REWARDS = {
    "True": 1.0, "numpy.float32(0.5)": 0.5, "numpy.bool_(True)": 1.0, "numpy.int64(3)": 3, "numpy.float64(0.25)": 0.25,
    "numpy.array(0.5)": 0.5, "torch.tensor(0.5)": 0.5, "torch.tensor(True)": 1.0, "Decimal('0.5')": 0.5,
    "Fraction(1, 4)": 0.25, "enum.IntEnum('E', 'A').A": 1, "torch.tensor(0.5, requires_grad=True)": 0.5,
    "{'score': numpy.float32(0.5), 'acc': True, 'all': numpy.arange(2)}": {"score": 0.5, "acc": 1.0, "all": [0, 1]},
    "float('nan')": None, "float('-inf')": None, "10**400": None, "None": None, "'1.0'": None, "b'1'": None,
    "1j": None, "[1.0]": None, "sample": None, "Decimal('nan')": None, "numpy.arange(2)": None, "{}": None,
    "{'score': object()}": None, "{'score': 1.0, 'x': float('nan')}": None, "{1: 1.0}": None,
    "numpy.complex64(1)": None,
    "{'score': 1.0, 'x': {'y': {'z': {1, 2}}}}": None, "(lambda d: d.update(score=1.0, me=d) or d)({})": None,
}  # fmt: skip
"""What a reward returns, and what the record has; None where it is refused."""

HEADER = """
import asyncio, atexit, ctypes, enum, gc, logging, os, random, signal, subprocess, sys, threading, time, traceback
import warnings
from decimal import Decimal
from fractions import Fraction
import numpy, torch

def run_in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

def in_main_thread():
    return threading.current_thread() is threading.main_thread()

"""


def function(case: HookCase, statements: str) -> str:
    """The source of a module whose function `own` runs `statements`, and then does what is right."""
    lines = [*statements.splitlines(), *case.body.splitlines()]
    head = f"{'async ' if case.is_async else ''}def own({case.parameters}):"
    return "\n".join([HEADER, head, *(f"    {line}" for line in lines)]) + "\n"


def arguments(case: HookCase, file: str) -> list[str]:
    return [*case.command, *case.options, "-s", f"{case.setting}={file}:own"]


def fault(result: warm.Result, case: HookCase, *, codes: set[int], named: bool = True) -> str:
    """What is wrong with an outcome; "" if nothing is."""
    if result.code not in codes:
        return f"exit code {result.code}: {result.stderr[-200:]!r}"
    if "Traceback (most recent call last)" in result.stderr and "Exception in thread" not in result.stderr:
        return f"a traceback: {result.stderr[-300:]!r}"
    for number, line in enumerate(result.stdout.splitlines(), start=1):
        try:
            if case.command[0] in ("score", "rollout"):
                read_sample(line, location=f"stdout:{number}", position=0)
            elif case.command[0] == "train":
                assert "metrics" in json.loads(line)
            else:
                assert line == b"runs/a"
        except (RecordError, ValueError, AssertionError) as error:
            return f"stdout line {number} is no record: {line[:80]!r} ({error})"
    last = (result.stderr.strip().splitlines() or [""])[-1]
    kept = [line for line in result.stderr.splitlines() if line.startswith("slimectl: ")]
    if result.code and named and not any("own" in line for line in kept):
        return f"no line names the function: {last[:200]!r}"
    if result.code and any(len(line) > 1500 for line in kept):
        return "a line of more than 1500 characters"
    return ""


class Attacks:
    """Carries attacks out in one folder."""

    def __init__(self, folder: Path, campaign: Campaign, rng: random.Random) -> None:
        self._folder, self._campaign, self._rng, self._number = folder, campaign, rng, 0

    def run(self, category: str, way: str, case: HookCase, source: str, *, codes: set[int]) -> warm.Result:
        self._number += 1
        file = f"own_{self._number}.py"
        (self._folder / file).write_text(source)
        result = warm.run(arguments(case, file), cwd=self._folder)
        found = fault(result, case, codes=codes)
        self._campaign.record(category, f"{way} at {case.name}", survived=not found, observation=found)
        return result

    def at_hooks(
        self, category: str, ways: dict[str, str], count: int, codes: set[int], *, failed_is_fine: bool
    ) -> None:
        """Draw ways and hooks so that each of both occurs about as often as every other."""
        drawn_ways = self._spread(list(ways), count)
        for way, case in zip(drawn_ways, self._spread(HOOKS, count), strict=True):
            allowed = set(codes)
            if failed_is_fine and case.setting == "rollout.custom_generate_function_path":
                allowed = {0}  # failed samples
            self.run(category, way, case, function(case, ways[way]), codes=allowed)

    def at_import(self, category: str, ways: dict[str, str], count: int, codes: set[int]) -> None:
        for way, case in zip(self._spread(list(ways), count), self._spread(HOOKS, count), strict=True):
            source = f"{HEADER}\n{ways[way]}\n" + function(case, "").removeprefix(HEADER)
            self.run(category, f"{way} at import", case, source, codes=codes)

    def rewards(self, count: int) -> None:
        for text in self._spread(list(REWARDS), count):
            case = HookCase("score.custom_rm_path", SCORE, "sample", f"return {text}", self._rng.random() < 0.3)
            wanted = REWARDS[text]
            result = self.run("returns a reward", text, case, function(case, ""), codes={2 if wanted is None else 0})
            if wanted is not None and result.code == 0:
                given = [json.loads(line)["reward"] for line in result.stdout.splitlines()]
                same = given == [wanted] * len(given) and not any(isinstance(reward, bool) for reward in given)
                self._campaign.record(
                    "is a number to the next stage", text, survived=same, observation=f"the record has {given[:1]}"
                )

    def _spread(self, choices: list, count: int) -> list:
        drawn: list = []
        while len(drawn) < count:
            drawn += self._rng.sample(choices, len(choices))
        return drawn[:count]


def prepare(folder: Path) -> None:
    """Write a model, prompts, and samples with and without rewards."""
    from slimectl.checkpoints.create import create_model

    (folder / "model").mkdir()
    create_model(TINY, folder / "model", seed=1)
    words = ("one", "two", "three", "four")
    prompts = [{"prompt": f"say {word}", "label": word} for word in words]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    for command in ([*ROLLOUT, "--out", "samples.jsonl"], [*SCORE, "--rm-type", "random", "--out", "scored.jsonl"]):
        result = warm.run(command, cwd=folder)
        assert result.code == 0, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=150)
    options = parser.parse_args()
    campaign = Campaign("user functions", seed=options.seed)
    warm.load()
    with tempfile.TemporaryDirectory(prefix="user-functions-") as name:
        prepare(Path(name))
        attacks, share = Attacks(Path(name), campaign, random.Random(options.seed)), options.count / 150
        attacks.at_hooks("prints", PRINTS, round(30 * share), {0}, failed_is_fine=False)
        attacks.at_hooks(
            "takes streams, folder or threads away", TAKES_AWAY, round(24 * share), {0}, failed_is_fine=False
        )
        attacks.at_hooks("ends the process", ENDS, round(26 * share), {2}, failed_is_fine=False)
        attacks.at_hooks("raises", RAISES, round(24 * share), {2}, failed_is_fine=True)
        attacks.at_hooks("returns nonsense", RETURNS, round(12 * share), {2}, failed_is_fine=False)
        attacks.at_import("prints at import", PRINTS, round(6 * share), {0})
        attacks.at_import("ends or raises at import", ENDS | RAISES, round(8 * share), {2})
        attacks.rewards(round(32 * share))
    return campaign.finish()


if __name__ == "__main__":
    raise SystemExit(main())
