"""Files that are not what a command expects: hostile bytes, wrong types, damaged containers, odd names, pipes.

    python benchmarks/reliability/odd_inputs.py --seed 1 [--count 220]

Each attack puts one oddity into a good file, at a place drawn from the seed, and gives it to a command that reads such
files. Survived: the command makes the right records of it, or refuses with exit code 2 or 3 and one line that names the
file (and the line, where there is one); with --on-error skip it leaves out that line alone, and says so.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import os
import random
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm
from campaign import Campaign
from user_functions import TINY

LINES = 6
SHORT = ["--model", "model", "-n", "1", "-s", "rollout.max_response_len=2"]
SAMPLES = {
    "score": ["score", "FILE", "--rm-type", "random"],
    "train": [
        "train",
        "FILE",
        "--model",
        "model",
        "-s",
        "train.global_batch_size=2",
        "--algorithm",
        "reinforce_plus_plus",
    ],
    "inspect": ["inspect", "FILE"],
}
PROMPTS = {
    "rollout": ["rollout", "--data", "FILE", *SHORT],
    "eval": ["eval", "--data", "a=FILE", *SHORT, "--rm-type", "random", "--out", "-"],
    "sft": ["train", "FILE", "--model", "model", "--algorithm", "sft", "-s", "train.global_batch_size=1"],
}


@dataclass(frozen=True)
class Oddity:
    """A change to one line, and what is to come of it: the line counts, or not, or either."""

    name: str
    change: Callable[[bytes], bytes]
    fine: bool | None = False


def with_field(**fields: Any) -> Callable[[bytes], bytes]:
    """A change that sets fields of the record; text in `RAW` stands as it is."""

    def change(line: bytes) -> bytes:
        record = json.loads(line)
        raw = {name: value.text for name, value in fields.items() if isinstance(value, Raw)}
        record |= {name: f"@{name}@" if name in raw else value for name, value in fields.items()}
        text = json.dumps(record)
        for name, value in raw.items():
            text = text.replace(f'"@{name}@"', value)
        return text.encode()

    return change


@dataclass(frozen=True)
class Raw:
    """JSON, or what is none, as it stands in the file."""

    text: str


ANY_LINE = [
    Oddity("cut off", lambda line: line[: len(line) // 2]),
    Oddity("a byte that is no UTF-8", lambda line: line[:-2] + b"\xff" + line[-2:]),
    Oddity("Latin-1", lambda line: line[:-1] + b', "note": "\xe9"}'),
    Oddity("UTF-16", lambda line: line.decode().encode("utf-16")),
    Oddity("NUL bytes", lambda line: b"\0" * 100),
    Oddity("a NUL in a string", lambda line: line[:-1] + b', "note": "a\0b"}'),
    Oddity("a tab in a string", lambda line: line[:-1] + b', "note": "a\tb"}'),
    Oddity("two objects", lambda line: line + b" " + line),
    Oddity("an array", lambda line: b"[" + line + b"]"),
    Oddity("a string", lambda line: b'"text"'),
    Oddity("a number", lambda line: b"42"),
    Oddity("null", lambda line: b"null"),
    Oddity("true", lambda line: b"true"),
    Oddity("NaN", lambda line: line[:-1] + b', "note": NaN}'),
    Oddity("-Infinity", lambda line: line[:-1] + b', "note": -Infinity}'),
    Oddity("1e999", lambda line: line[:-1] + b', "note": 1e999}'),
    Oddity("-1E+400 in a list", lambda line: line[:-1] + b', "note": [0, {"a": -1E+400}]}'),
    Oddity("a number of 5000 digits", lambda line: line[:-1] + b', "note": ' + b"9" * 5000 + b"}"),
    Oddity("brackets 100 000 deep", lambda line: line[:-1] + b', "note": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    Oddity("a comma too many", lambda line: line[:-1] + b",}"),
    Oddity("single quotes", lambda line: line.replace(b'"', b"'")),
    Oddity("a comment", lambda line: b"// " + line),
    Oddity("a byte order mark inside", lambda line: b"\xef\xbb\xbf" + line, fine=None),
    Oddity("a lone surrogate in UTF-8", lambda line: line[:-1] + b', "note": "\xed\xa0\x80"}'),
    Oddity("YAML", lambda line: b"prompt: text"),
    Oddity("ANSI escapes", lambda line: b"\x1b[31m" + line),
    Oddity("a conflict marker", lambda line: b"<<<<<<< HEAD"),
    Oddity("words", lambda line: b"Traceback (most recent call last):"),
    Oddity("a shell's words", lambda line: b"$(touch proof)`touch proof`"),
    Oddity("blanks around", lambda line: b"  \t" + line + b"   ", fine=True),
    Oddity("CR LF", lambda line: line + b"\r", fine=True),
    Oddity("an empty line before", lambda line: b"\n \n" + line, fine=True),
    Oddity("an unknown key", lambda line: line[:-1] + b', "note": {"a": [1, 2.5, null]}}', fine=True),
    Oddity("an empty key", lambda line: line[:-1] + b', "": 1}', fine=True),
    Oddity("a key twice", lambda line: b'{"metadata": {"a": 1}, ' + line[1:], fine=True),
    Oddity("1e300", lambda line: line[:-1] + b', "note": 1e300}', fine=True),
    Oddity("1e-999", lambda line: line[:-1] + b', "note": 1e-999}', fine=True),
    Oddity("a line separator of Unicode", lambda line: line[:-1] + ', "note": "a\u2028b\u0085c"}'.encode(), fine=True),
    Oddity("half a surrogate pair escaped", lambda line: line[:-1] + b', "note": "\\ud800"}', fine=True),
    Oddity("objects 200 deep", lambda line: line[:-1] + b', "note": ' + b'{"a":' * 200 + b"1" + b"}" * 201, fine=True),
    Oddity("5 MB of text", lambda line: line[:-1] + b', "note": "' + b"x" * 5_000_000 + b'"}', fine=True),
    Oddity(
        "10 000 keys", lambda line: line[:-1] + b"".join(b', "k%d": 1' % i for i in range(10_000)) + b"}", fine=True
    ),
    Oddity("__proto__ and __class__", lambda line: line[:-1] + b', "__proto__": {}, "__class__": "os"}', fine=True),
]
OF_SAMPLES = [
    *(Oddity(f"{name}: {value!r:.30}", with_field(**{name: value})) for name, value in [
        ("index", -1), ("index", 1.5), ("index", "1"), ("index", True), ("index", 2**70), ("group_index", None),
        ("group_index", [1]), ("prompt", 5), ("prompt", None), ("prompt", [{"content": "x"}]), ("prompt", [1]),
        ("prompt", [{"role": "user", "content": 5}]), ("tokens", "1 2"), ("tokens", [1, "2"]), ("tokens", [-1, 2, 3]),
        ("tokens", [1.0]), ("tokens", None), ("tokens", [2**65]), ("tokens", [True]), ("response", 5),
        ("response", None), ("response_length", -1), ("response_length", 99), ("response_length", "1"),
        ("label", {"a": 1}), ("label", [1]), ("label", True), ("reward", "1"), ("reward", True), ("reward", [1]),
        ("loss_mask", [1]), ("loss_mask", [2, 0]), ("loss_mask", "11"), ("rollout_log_probs", [0.0]),
        ("rollout_log_probs", [0, None]), ("status", "done"), ("status", None), ("status", 1), ("metadata", []),
        ("metadata", "{}"), ("remove_sample", "no"), ("remove_sample", 0), ("weight_versions", [1]),
        ("custom_rm_path", 5), ("train_metadata", 1), ("spec_info", []), ("non_generation_time", "1"),
    ]),
    *(Oddity(f"{name}: {text}", with_field(**{name: Raw(text)})) for name, text in [
        ("reward", "1e999"), ("label", "1e400"), ("label", "NaN"), ("rollout_log_probs", "[-1e999, 0]"),
        ("non_generation_time", "1e999"), ("metadata", '{"a": Infinity}'), ("index", "1e2"), ("tokens", "[1, 2, 3, ]"),
    ]),
    Oddity("metadata: null", with_field(metadata=None), fine=True),
    Oddity("label: a number of 400 digits", with_field(label=10**400), fine=None),
    Oddity("an empty object", lambda line: b"{}", fine=None),
]  # fmt: skip
OF_PROMPTS = [
    *(Oddity(f"{name}: {value!r:.30}", with_field(**{name: value})) for name, value in [
        ("prompt", None), ("prompt", 5), ("prompt", ""), ("prompt", []), ("prompt", {}), ("prompt", ["a"]),
        ("prompt", [{"role": "user"}, {"content": "a"}]), ("prompt", [{"role": 1, "content": "a"}]),
        ("prompt", [{"role": "user", "content": 5}]), ("label", {}), ("label", []), ("label", True),
        ("metadata", "text"), ("metadata", [1]), ("metadata", 5), ("tools", "text"), ("tools", {}), ("tools", [1]),
    ] if (name, value) != ("tools", {})),
    Oddity("no prompt", lambda line: b'{"question": "a", "label": "b"}'),
    Oddity("label: 1e999", with_field(label=Raw("1e999"))),
    Oddity("metadata as JSON text", with_field(metadata='{"a": 1}'), fine=True),
    Oddity("metadata: null", with_field(metadata=None), fine=True),
    Oddity("a prompt of 100 000 characters", with_field(prompt="x" * 100_000), fine=None),
    Oddity("a prompt of one blank", with_field(prompt=" "), fine=True),
    Oddity("a prompt of emoji and marks", with_field(prompt="\U0001f469\u200d\U0001f680\u0301\u202e"), fine=True),
    Oddity("a prompt with half a surrogate pair", with_field(prompt="a\ud800"), fine=None),
    Oddity("special tokens in the prompt", with_field(prompt="<|endoftext|></s><|im_end|>"), fine=True),
    Oddity("a path of code in the metadata", with_field(metadata={"custom_rm_path": "evil.py:touch"}), fine=True),
    Oddity("a generate function in the row", with_field(generate_function_path="evil.py:touch"), fine=True),
]  # fmt: skip
PATHS = [
    Oddity("custom_rm_path", with_field(custom_rm_path="evil.py:touch")),
    Oddity("custom_rm_path: a module", with_field(custom_rm_path="os.system")),
    Oddity("generate_function_path", with_field(generate_function_path="evil.py:touch"), fine=True),
    Oddity("metadata.custom_rm_path", with_field(metadata={"custom_rm_path": "evil.py:touch"}), fine=True),
    Oddity("metadata.rm_type: unknown", with_field(metadata={"rm_type": "evil.py:touch"})),
    Oddity("metadata.rm_type: a judge", with_field(metadata={"rm_type": "judge", "url": "http://127.0.0.1:9/"})),
    Oddity("metadata.rm_type: remote_rm", with_field(metadata={"rm_type": "remote_rm"})),
    Oddity("metadata.rm_type: a reward model", with_field(metadata={"rm_type": "reward_model", "path": "/"})),
    Oddity("metadata.rm_type: a list", with_field(metadata={"rm_type": ["exact"]})),
    Oddity("metadata.rm_type: exact without a label", with_field(metadata={"rm_type": "exact"}, label=None)),
    Oddity("metadata.rm_type: code without tests", with_field(metadata={"rm_type": "code"})),
    Oddity("metadata.rm_type: regex that is none", with_field(metadata={"rm_type": "regex"}, label="(")),
]


class Attacks:
    """Writes odd files into one folder and gives them to commands."""

    def __init__(self, folder: Path, campaign: Campaign, rng: random.Random, good: dict[str, list[bytes]]) -> None:
        self.folder, self.campaign, self.rng, self.good = folder, campaign, rng, good
        self.number = 0

    def file(self, suffix: str, content: bytes) -> str:
        self.number += 1
        path = self.folder / f"odd{self.number}{suffix}"
        path.write_bytes(content)
        return path.name

    def one_line(self, category: str, oddity: Oddity, kind: str, command: str, *, skips: bool = False) -> None:
        """Put the oddity into one line of a good file."""
        lines, at = list(self.good[kind]), self.rng.randrange(LINES)
        lines[at] = oddity.change(lines[at])
        name = self.file(self.rng.choice([".jsonl", ".jsonl", ".jsonl.gz"]), b"")
        content = b"\n".join(lines) + b"\n" * self.rng.choice([0, 1])
        (self.folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        number = content[: content.find(lines[at])].count(b"\n") + 1 + lines[at].count(b"\n")
        arguments = [word.replace("FILE", name) for word in {**SAMPLES, **PROMPTS}[command]]
        result = warm.run([*arguments, *(["--on-error", "skip"] if skips else [])], cwd=self.folder)
        expected = {True: "good", False: "bad", None: "either"}[oddity.fine]
        found = self._skipped(result, name, number, oddity) if skips else self._fault(
            result, command, expected, f"{name}:{number}", LINES
        )  # fmt: skip
        attack = f"{oddity.name} in line {number} for {command}{' --on-error skip' if skips else ''}"
        self.campaign.record(category, attack, survived=not found, observation=found)

    def _fault(self, result: warm.Result, command: str, expected: str, named: str, records: int) -> str:
        """What is wrong with an outcome; "" if nothing is."""
        own = [line for line in result.stderr.splitlines() if line.startswith("slimectl: ")]
        if (self.folder / "proof").exists():
            (self.folder / "proof").unlink()
            return "data ran code"
        if "Traceback" in result.stderr.replace("Traceback (most recent call last):' ", ""):
            return f"a traceback: {result.stderr[-300:]!r}"
        if result.code == 0:
            count = len(result.stdout.splitlines())
            if expected == "bad":
                return f"taken for good: {result.stdout[:100]!r}"
            if command in ("score", "rollout") and expected == "good" and count != records:
                return f"{count} records of {records}: {result.stderr[-200:]!r}"
            return ""
        if expected == "good" or result.code not in (2, 3):
            return f"exit code {result.code}: {result.stderr[-300:]!r}"
        if len(own) != 1 or named not in own[0]:
            return f"no one line with {named}: {result.stderr[-300:]!r}"
        return "" if len(own[0]) < 2000 else "a line of more than 2000 characters"

    def _skipped(self, result: warm.Result, name: str, number: int, oddity: Oddity) -> str:
        out = LINES if oddity.fine else LINES - 1
        if result.code != 0 or (oddity.fine is not None and len(result.stdout.splitlines()) != out):
            return f"exit code {result.code}, {len(result.stdout.splitlines())} records: {result.stderr[-300:]!r}"
        told = f"skipped: {name}:{number}: " in result.stderr and f"1 of {LINES} lines skipped" in result.stderr
        return "" if told or oddity.fine or oddity.fine is None else f"not told: {result.stderr[-300:]!r}"

    def whole_file(self, name: str, path: str, commands: dict[str, list[str]], expected: str, records: int) -> None:
        command = self.rng.choice(list(commands))
        if command == "inspect" and (path in ("model", "/dev/null") or "alone" in name or "empty" in name):
            expected = "either"  # it shows whatever there is
        arguments = [word.replace("FILE", path) for word in commands[command]]
        result = warm.run(arguments, cwd=self.folder, timeout_s=60)
        found = self._fault(result, command, expected, path.partition("@[")[0].partition(":")[0], records)
        self.campaign.record("whole files", f"{name} for {command}", survived=not found, observation=found)

    def containers(self) -> list[tuple[str, str, str, int]]:
        """(what, path, outcome, records) of files of samples that are damaged or odd as a whole."""
        import zstandard

        lines, content = self.good["samples"], b"\n".join(self.good["samples"]) + b"\n"
        packed, zipped, cut = gzip.compress(content), zstandard.compress(content), self.rng.randrange(20, 60)
        half = b"\n".join(lines[:3]) + b"\n"
        flipped = bytearray(packed)
        flipped[-6] ^= 1
        made = [
            ("a .gz that is cut off", self.file(".jsonl.gz", packed[:-cut]), "bad", 0),
            ("a .gz with a wrong checksum", self.file(".jsonl.gz", bytes(flipped)), "bad", 0),
            ("a .gz that is text", self.file(".jsonl.gz", content), "bad", 0),
            ("an empty .gz", self.file(".jsonl.gz", b""), "bad", 0),
            ("a .gz with rubbish behind it", self.file(".jsonl.gz", packed + b"rubbish"), "bad", 0),
            ("two .gz in one", self.file(".jsonl.gz", gzip.compress(half) * 2), "good", 6),
            ("a .zst that is cut off", self.file(".jsonl.zst", zipped[:-cut]), "bad", 0),
            ("a .zst that is text", self.file(".jsonl.zst", content), "bad", 0),
            ("two .zst in one", self.file(".jsonl.zst", zstandard.compress(half) * 2), "good", 6),
            ("gzip named .jsonl", self.file(".jsonl", packed), "bad", 0),
            ("an empty file", self.file(".jsonl", b""), "bad", 0),
            ("blank lines alone", self.file(".jsonl", b"\n \n\t\n"), "bad", 0),
            ("a byte order mark alone", self.file(".jsonl", b"\xef\xbb\xbf"), "bad", 0),
            ("a byte order mark first", self.file(".jsonl", b"\xef\xbb\xbf" + content), "good", 6),
            ("UTF-16 with its mark", self.file(".jsonl", content.decode().encode("utf-16")), "bad", 0),
            ("no newline at the end", self.file(".jsonl", content[:-1]), "good", 6),
            ("CR alone between lines", self.file(".jsonl", content.replace(b"\n", b"\r")), "bad", 0),
            ("random bytes", self.file(".jsonl", self.rng.randbytes(5000)), "bad", 0),
            ("a name with blanks and a newline", self.file(" a\nb\u00e9.jsonl", content), "either", 6),
            ("a folder", "model", "bad", 0),
            ("nothing", "nowhere.jsonl", "bad", 0),
            ("/dev/null", "/dev/null", "bad", 0),
            ("a weights file", "model/model.safetensors", "bad", 0),
        ]
        for name, link in (("a link to itself", "loop.jsonl"), ("a link to nothing", "dangling.jsonl")):
            target = self.folder / link
            if not target.is_symlink():
                target.symlink_to(link if "itself" in name else "gone.jsonl")
            made.append((name, link, "bad", 0))
        if not (self.folder / "socket.jsonl").exists():
            socket.socket(socket.AF_UNIX).bind(str(self.folder / "socket.jsonl"))
        made.append(("a socket", "socket.jsonl", "bad", 0))
        made.append(("a FIFO", self.fifo(content), "good", 6))
        return made

    def fifo(self, content: bytes) -> str:
        """A FIFO into which a child writes once."""
        self.number += 1
        path = self.folder / f"odd{self.number}.jsonl"
        os.mkfifo(path)
        if not os.fork():
            path.write_bytes(content)
            os._exit(0)
        return path.name

    def tables(self) -> list[tuple[str, str, str, int]]:
        """(what, path, outcome, records) of tables of prompts, slices and globs."""
        import pyarrow
        import pyarrow.parquet as parquet

        rows = [json.loads(line) for line in self.good["prompts"]]
        content = b"\n".join(self.good["prompts"]) + b"\n"

        def table(columns: dict[str, Any]) -> bytes:
            out = io.BytesIO()
            parquet.write_table(pyarrow.table(columns), out)
            return out.getvalue()

        text = io.StringIO()
        writer = csv.DictWriter(text, ["prompt", "label"])
        writer.writeheader()
        writer.writerows({key: row[key] for key in ("prompt", "label")} for row in rows)
        sheet, plain = text.getvalue().encode(), self.file(".jsonl", content)
        whole = table({"prompt": [row["prompt"] for row in rows], "label": [row["label"] for row in rows]})
        cut = self.rng.randrange(10, len(whole) // 2)
        return [
            ("a CSV", self.file(".csv", sheet), "good", 6),
            ("a CSV with a mark first", self.file(".csv", b"\xef\xbb\xbf" + sheet), "good", 6),
            ("a CSV with a short row", self.file(".csv", sheet + b"alone\r\n"), "bad", 0),
            ("a CSV with a long row", self.file(".csv", sheet + b"a,b,c\r\n"), "bad", 0),
            ("a CSV with an open quote", self.file(".csv", sheet + b'"open,b\r\n'), "bad", 0),
            ("a CSV with two columns of one name", self.file(".csv", b"prompt,prompt\na,b\n"), "bad", 0),
            ("a CSV of a header alone", self.file(".csv", b"prompt,label\n"), "bad", 0),
            ("a CSV with semicolons", self.file(".csv", b"prompt;label\na;b\n"), "bad", 0),
            ("a CSV with NUL", self.file(".csv", sheet + b"a\0b,c\n"), "either", 7),
            ("a CSV with a quoted newline", self.file(".csv", sheet + b'"a\nb",c\r\n'), "good", 7),
            ("a CSV in Latin-1", self.file(".csv", sheet + b"\xe9,c\r\n"), "bad", 0),
            ("an empty CSV", self.file(".csv", b""), "bad", 0),
            ("a CSV in .gz", self.file(".csv.gz", gzip.compress(sheet)), "good", 6),
            ("JSON lines named .csv", self.file(".csv", content), "bad", 0),
            ("a Parquet file", self.file(".parquet", whole), "good", 6),
            ("a Parquet file that is cut off", self.file(".parquet", whole[:-cut]), "bad", 0),
            ("a Parquet file with a hole", self.file(".parquet", whole[:8] + bytes(cut) + whole[8 + cut :]), "bad", 0),
            ("a Parquet file without rows", self.file(".parquet", table({"prompt": [], "label": []})), "bad", 0),
            ("a Parquet file without the column", self.file(".parquet", table({"question": ["a"]})), "bad", 0),
            ("a Parquet file of numbers", self.file(".parquet", table({"prompt": [1, 2]})), "bad", 0),
            ("a Parquet file of nulls", self.file(".parquet", table({"prompt": ["a", None]})), "bad", 0),
            ("a Parquet file of bytes", self.file(".parquet", table({"prompt": [b"\xff"]})), "bad", 0),
            ("a Parquet file of chats", self.file(".parquet", table(
                {"prompt": [[{"role": "user", "content": "a"}]], "label": ["b"]})), "good", 1),
            ("Parquet named .jsonl", self.file(".jsonl", whole), "bad", 0),
            ("JSON lines named .parquet", self.file(".parquet", content), "bad", 0),
            ("a JSON array", self.file(".json", json.dumps(rows).encode()), "good", 6),
            ("a JSON array with more behind", self.file(".json", json.dumps(rows).encode() + b"{}"), "bad", 0),
            ("a JSON array of texts", self.file(".json", b'["a", "b"]'), "bad", 0),
            ("a JSON array with 1e999", self.file(".json", b'[{"prompt": "a", "x": 1e999}]'), "bad", 0),
            ("an empty JSON array", self.file(".json", b"[]"), "bad", 0),
            ("an open JSON array", self.file(".json", b'[{"prompt": "a"}'), "bad", 0),
            ("a slice", f"{plain}@[1:3]", "good", 2),
            ("a slice from the end", f"{plain}@[-2:]", "good", 2),
            ("a slice beyond the end", f"{plain}@[90:]", "bad", 0),
            ("a slice of nothing", f"{plain}@[3:1]", "bad", 0),
            ("a slice that is none", f"{plain}@[a:b]", "bad", 0),
            ("a glob of nothing", "none-*.jsonl", "bad", 0),
            ("a FIFO", self.fifo(content), "good", 6),
            ("a module that is not there", "no_such_module:rows", "bad", 0),
            ("a task that is not there", "reasoning_gym:no_such_task", "bad", 0),
        ]  # fmt: skip


def prepare(folder: Path) -> dict[str, list[bytes]]:
    """Write a model and the file that hostile records name; return good lines of each kind."""
    from slimectl.checkpoints.create import create_model

    (folder / "model").mkdir()
    create_model(TINY, folder / "model", seed=1)
    (folder / "evil.py").write_text("def touch(*a, **k):\n    open('proof', 'w')\n    return 1.0\nopen('proof', 'w')\n")
    samples = [
        {"group_index": i // 2, "index": i, "prompt": "x", "tokens": [5, 6, 7, 8], "response": f"b{i}",
         "response_length": 2, "label": f"b{i}", "reward": i % 3 / 2, "rollout_log_probs": [-1.5, -0.5],
         "status": "completed", "metadata": {}}
        for i in range(LINES)
    ]  # fmt: skip
    prompts = [{"prompt": f"say {i}", "label": f"b{i}", "metadata": {}} for i in range(LINES)]
    return {"samples": [json.dumps(s).encode() for s in samples], "prompts": [json.dumps(p).encode() for p in prompts]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=220)
    options = parser.parse_args()
    campaign, rng = Campaign("odd inputs", seed=options.seed), random.Random(options.seed)
    warm.load()
    with tempfile.TemporaryDirectory(prefix="odd-inputs-") as name:
        attacks = Attacks(Path(name), campaign, rng, prepare(Path(name)))
        plan = [
            ("bytes of a line of samples", ANY_LINE, "samples", ["score", "train"], 34),
            ("bytes of a line of prompts", ANY_LINE, "prompts", ["rollout", "eval", "sft"], 34),
            ("fields of a sample", OF_SAMPLES, "samples", ["score", "train"], 36),
            ("fields of a prompt", OF_PROMPTS, "prompts", ["rollout", "eval"], 24),
            ("records that choose code", PATHS, "samples", ["score"], 12),
        ]
        for category, oddities, kind, commands, share in plan:
            for oddity in rng.sample(oddities, min(len(oddities), round(share * options.count / 220))):
                attacks.one_line(category, oddity, kind, rng.choice(commands))
        for oddity in rng.sample([*ANY_LINE, *OF_SAMPLES, *PATHS], round(24 * options.count / 220)):
            attacks.one_line("a bad line that is skipped", oddity, "samples", "score", skips=True)
        for what, path, expected, records in attacks.containers():
            attacks.whole_file(what, path, SAMPLES if "train" in SAMPLES else {}, expected, records)
        for what, path, expected, records in attacks.tables():
            commands = {key: PROMPTS[key] for key in ("rollout", "eval")}
            attacks.whole_file(what, path, commands, expected, records)
    return campaign.finish()


if __name__ == "__main__":
    raise SystemExit(main())
