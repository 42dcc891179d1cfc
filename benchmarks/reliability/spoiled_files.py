"""Ways to spoil a model folder: files that are none, links out of it, damaged weights and manifests."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOADS = frozenset({"convert", "rollout", "train", "eval"})
SAMPLES = frozenset({"rollout", "train", "eval"})
ANY = frozenset[str]()


@dataclass(frozen=True)
class Attack:
    """One way to spoil a folder, and the commands that have to refuse it."""

    category: str
    title: str
    spoil: Callable[[Path], Any]
    refused: frozenset[str] = ANY


def replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        make(path)

    return spoil


def written(name: str, data: bytes | str) -> Callable[[Path], None]:
    raw = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    return replaced(name, lambda path: path.write_bytes(raw))


def edited(name: str, **changes: Any) -> Callable[[Path], None]:
    """Other values of some keys of a JSON file; an Ellipsis drops its key."""

    def spoil(folder: Path) -> None:
        path = folder / name
        facts = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
        path.write_text(json.dumps({key: value for key, value in facts.items() if value is not ...}))

    return spoil


def bound_socket(path: Path) -> None:
    home = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(home)


KINDS: dict[str, Callable[[Path], Any]] = {
    "a FIFO": os.mkfifo,
    "a socket": bound_socket,
    "a directory": Path.mkdir,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /proc/kcore": lambda path: path.symlink_to("/proc/kcore"),
    "a link to a secret": lambda path: path.symlink_to("../secret"),
    "a link to /": lambda path: path.symlink_to("/"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("gone"),
}
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
         "chat_template.jinja", "vocab.json", "model.safetensors.index.json", "manifest.json")  # fmt: skip
BROKEN_JSON = ("", "{", "[]", "7", "null", '"a"', "\0" * 99, "[" * 10**6, '{"a":' * 10**5, "\udcff", "{'a': 1}", "NaN",
               '{"a": ' + "9" * 10**5 + "}", "{}")  # fmt: skip


def of_files(draw: random.Random) -> Iterator[Attack]:
    for name in FILES:
        for kind, make in KINDS.items():
            harmless = name == "manifest.json" or (name == "model.safetensors.index.json" and "nothing" in kind)
            yield Attack("files that are none", f"{name}: {kind}", replaced(name, make), ANY if harmless else LOADS)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        yield Attack(
            "files that are none",
            f"{name}: 10**12 bytes",
            replaced(name, lambda path: (path.touch(), os.truncate(path, 10**12))),
            LOADS,
        )
    names = ("tokenizer.model", "tokenizer_notes", "merges.txt", "vocab.txt", "special_tokens_map.json")
    for name in names:
        yield Attack(
            "links out of the folder",
            f"{name} to a secret",
            replaced(name, lambda path: path.symlink_to("../secret")),
            LOADS,
        )
        yield Attack(
            "links out of the folder",
            f"{name} to /etc/hostname",
            replaced(name, lambda path: path.symlink_to("/etc/hostname")),
            LOADS,
        )
    yield Attack(
        "links out of the folder",
        "README.md to a secret",
        replaced("README.md", lambda path: path.symlink_to("../secret")),
    )
    yield Attack(
        "links out of the folder",
        "additional_chat_templates",
        replaced("additional_chat_templates", lambda path: path.symlink_to("..")),
        LOADS,
    )


def of_weights(draw: random.Random) -> Iterator[Attack]:
    def headed(change: Callable[[dict[str, Any]], Any], *, grow: int = 0) -> Callable[[Path], None]:
        """Another header before the same data."""

        def spoil(folder: Path) -> None:
            path = folder / "model.safetensors"
            data = path.read_bytes()
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            header = change(header) or header
            text = json.dumps(header).encode()
            path.write_bytes((len(text) + grow).to_bytes(8, "little") + text + data[8 + length :])

        return spoil

    def each(**fields: Any) -> Callable[[dict[str, Any]], None]:
        def change(header: dict[str, Any]) -> None:
            for name, facts in header.items():
                if name != "__metadata__":
                    facts.update(fields)

        return change

    for fields in (
        {"data_offsets": [-8, 0]},
        {"data_offsets": [0, 2**60]},
        {"data_offsets": [2**62, 2**62 + 4]},
        {"data_offsets": "ab"},
        {"data_offsets": [0]},
        {"data_offsets": [1.5, 2.5]},
        {"data_offsets": None},
        {"shape": [2**31, 2**31]},
        {"shape": [-1, 4]},
        {"shape": []},
        {"shape": "ab"},
        {"shape": [2.0]},
        {"shape": [True]},
        {"shape": [1] * 99},
        {"dtype": "F99"},
        {"dtype": 7},
        {"dtype": "BOOL"},
        {"dtype": "F64"},
        {"shape": [0], "data_offsets": [0, 0]},
        {"shape": [10**10], "dtype": "U8", "data_offsets": [0, 10**10]},
    ):
        yield Attack("weights", f"header {fields}", headed(each(**fields)), LOADS)
    yield Attack("weights", "a header that is a list", headed(lambda header: [header]), LOADS)
    yield Attack("weights", "a header of text", headed(lambda header: {"a": "b"}), LOADS)
    yield Attack("weights", "an empty header", headed(lambda header: {"__metadata__": {}}), LOADS)
    yield Attack("weights", "a header that is too long", headed(lambda header: None, grow=2**40), LOADS)
    yield Attack(
        "weights",
        "a header 10**5 deep",
        replaced(
            "model.safetensors",
            lambda path: path.write_bytes((10**5).to_bytes(8, "little") + b"[" * 10**5 + bytes(10**6)),
        ),
        LOADS,
    )
    yield Attack(
        "weights",
        "10**13 bytes of nothing",
        replaced("model.safetensors", lambda path: (path.touch(), os.truncate(path, 10**13))),
        LOADS,
    )
    yield Attack(
        "weights",
        "cut short",
        lambda folder: os.truncate(folder / "model.safetensors", draw.randrange(0, 10**5)),
        LOADS,
    )
    yield Attack("weights", "noise", written("model.safetensors", draw.randbytes(10**5)), LOADS)
    yield Attack(
        "weights",
        "a pickle",
        written("model.safetensors", b"cos\nsystem\n(S'touch ../proof'\ntR." + bytes(10**5)),
        LOADS,
    )
    yield Attack(
        "weights",
        "a pickle as pytorch_model.bin",
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        LOADS,
    )
    for names in (
        ["../secret"],
        ["/etc/passwd"],
        [7],
        [None],
        ["gone"],
        ["a" * 5000],
        ["."],
        ["model.safetensors", "../secret"],
    ):
        index = {"weight_map": {f"{number}": name for number, name in enumerate(names)}}
        yield Attack(
            "weights",
            f"an index that names {str(names)[:30]}",
            written("model.safetensors.index.json", json.dumps(index)),
            LOADS,
        )
    for text in BROKEN_JSON:
        yield Attack("weights", f"an index {text[:20]!r}", written("model.safetensors.index.json", text), LOADS)


def of_manifests(draw: random.Random) -> Iterator[Attack]:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        for _ in range(2):
            at = draw.random()

            def flip(folder: Path, name: str = name, at: float = at) -> None:
                data = bytearray((folder / name).read_bytes())
                data[int(at * len(data))] ^= 1 << draw.randrange(8)
                (folder / name).write_bytes(data)

            yield Attack("a flipped byte under a manifest", f"{name} at {at:.2f}", flip, LOADS)
        yield Attack(
            "a flipped byte under a manifest",
            f"{name} is gone",
            lambda folder, name=name: (folder / name).unlink(),
            LOADS,
        )
    for files in (
        [],
        7,
        {"../secret": {"bytes": 10, "sha256": "0" * 64}},
        {"/dev/zero": {"bytes": 0, "sha256": ""}},
        {"a": []},
        {"config.json": {"bytes": "x", "sha256": 7}},
    ):
        yield Attack("manifests", f"files {str(files)[:30]}", written("manifest.json", json.dumps({"files": files})))
    for text in BROKEN_JSON:
        yield Attack("manifests", text[:20], written("manifest.json", text))
