"""Hostile torch_dist checkpoints through `convert` and `inspect`: a proof file that stays absent, one line, bounded.

    python benchmarks/reliability/torch_dist.py --seed 1 [--count 150]

Each attack takes a genuine checkpoint (a two-layer model, converted), puts a pickle that would run `touch PROOF` or a
lie about shapes, places and files into it, and runs the real commands on it.
"""

from __future__ import annotations

import argparse
import copyreg
import os
import pickle
import random
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))

import warm
from campaign import Campaign
from checkpoints.hostile_pickles import EXTENSION, archive, payloads, tensor_pickle

Attack = Callable[[Path], None]


def in_metadata(hostile: bytes, how: str) -> Attack:
    """A pickle as `.metadata`: alone, before the genuine one, or after its objects."""

    def apply(folder: Path) -> None:
        genuine = (folder / ".metadata").read_bytes()
        data = {
            "alone": hostile,
            "before": hostile.removesuffix(b".") + b"0" + genuine,
            "after": genuine.removesuffix(b".") + hostile.removesuffix(b".") + b"0.",
        }[how]
        (folder / ".metadata").write_bytes(data)

    return apply


def in_chunk(data: bytes) -> Attack:
    """An archive in place of every chunk."""

    def change(metadata: Any, folder: Path) -> None:
        (folder / "__9_0.distcp").write_bytes(data)
        for place in metadata.storage_data.values():
            place.relative_path, place.offset, place.length = "__9_0.distcp", 0, len(data)

    return rewritten(change)


def rewritten(change: Callable[[Any, Path], None]) -> Attack:
    def apply(folder: Path) -> None:
        from slimectl.checkpoints.torch_dist.metadata import read_metadata

        metadata = read_metadata(folder)
        change(metadata, folder)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


def places(**fields: Any) -> Attack:
    def change(metadata: Any, _: Path) -> None:
        for place in metadata.storage_data.values():
            vars(place).update(fields)

    return rewritten(change)


def chunks(**fields: Any) -> Attack:
    def change(metadata: Any, _: Path) -> None:
        for facts in metadata.state_dict_metadata.values():
            for chunk in getattr(facts, "chunks", ()):
                vars(chunk).update(fields)

    return rewritten(change)


def tensors(**fields: Any) -> Attack:
    def change(metadata: Any, _: Path) -> None:
        for facts in metadata.state_dict_metadata.values():
            if hasattr(facts, "chunks"):
                vars(facts).update(fields)

    return rewritten(change)


def replaced(name: str, make: Callable[[Path], Any]) -> Attack:
    """Something else under a file's name."""

    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return apply


def overlapping(metadata: Any, _: Path) -> None:
    for facts in metadata.state_dict_metadata.values():
        if len(getattr(facts, "chunks", ())) > 1:
            facts.chunks[1] = facts.chunks[0]


def attacks(proof: Path, draw: random.Random) -> Iterator[tuple[str, str, Attack]]:
    """(category, name, attack): all there are, in the order of the draw."""
    every: list[tuple[str, str, Attack]] = []
    for name, hostile in payloads(proof).items():
        how = draw.choice(("alone", "before", "after"))
        every.append(("pickle in .metadata", f"{name}, {how}", in_metadata(hostile, how)))
        packed = draw.random() < 0.2
        every.append(("pickle in a chunk", f"{name}, packed={packed}", in_chunk(archive(hostile, packed=packed))))
        write = draw.choice((archive(hostile), hostile))
        every.append(
            ("pickle in common.pt", name, replaced("common.pt", lambda path, data=write: path.write_bytes(data)))
        )
    number = draw.choice((2**31, 2**40, 2**63, 2**70))
    size = draw.randrange(1, 2**40)
    for name, attack in {
        f"relative_path {path}": places(relative_path=path)
        for path in ("../secret", "/etc/passwd", "a/b", "..", "", "\0", "\n", "x" * 5000, None, 7, b"x")
    }.items():
        every.append(("places", name, attack))
    for value in (-1, number, 1.5, float("nan"), None, "7", True, [1]):
        every += [("places", f"{field} {value}", places(**{field: value})) for field in ("offset", "length")]
    for value in ((size, size), (-size, 2), (), tuple([1] * 99), "ab", None, (1.5, 2), ("a",), (size,) * 16):
        every += [
            ("shapes", f"chunk {field} {str(value)[:40]}", chunks(**{field: value})) for field in ("offsets", "sizes")
        ]
        every.append(("shapes", f"size {str(value)[:40]}", tensors(size=value)))
    every += [
        ("shapes", "overlapping chunks", rewritten(overlapping)),
        ("shapes", "no chunks", tensors(chunks=[])),
        ("shapes", "10**5 chunks", tensors(chunks=[])),
        ("shapes", "chunks that are no list", tensors(chunks="ab")),
    ]
    every += [
        ("archives", f"{arguments}", in_chunk(archive(tensor_pickle(**arguments))))
        for arguments in (
            {"count": size}, {"size": (size,), "stride": (0,)}, {"offset": size}, {"offset": -8}, {"stride": (-1,)},
            {"kind": "ComplexFloatStorage"}, {"key": "../../../etc/passwd"}, {"key": "/etc/passwd"}, {"size": (-1,)},
            {"kind": "DoubleStorage"}, {"size": (2,) * 60, "stride": (0,) * 60},
        )
    ]  # fmt: skip
    odd = ("../../evil.pkl", "/etc/evil", "archive/../x", "a" * 60_000, "archive/data/\n", "archive\\data.pkl")
    for name in odd:
        data = archive(tensor_pickle(), edit=lambda entries, name=name: entries.writestr(name, b"x"))
        every.append(("archives", f"an entry {name[:30]!r}", in_chunk(data)))
    every += [
        ("archives", "10**5 entries", in_chunk(archive(tensor_pickle(), edit=many_entries))),
        ("archives", "a bomb of zeros", in_chunk(bomb())),
        ("archives", "cut short", in_chunk(archive(tensor_pickle())[: draw.randrange(1, 900)])),
        ("archives", "noise", in_chunk(draw.randbytes(2000))),
    ]  # fmt: skip
    for name in (".metadata", "__0_0.distcp", "common.pt", "metadata.json", "config.json"):
        for kind, make in KINDS.items():
            every.append(("files", f"{name}: {kind}", replaced(name, make)))
    for text in ("[" * 10**6, "{", '{"sharded_backend": 7}', '{"sharded_backend": "zarr"}', "null", "\xff"):
        every.append(
            (
                "files",
                f"metadata.json {text[:20]}",
                replaced("metadata.json", lambda path, text=text: path.write_text(text)),
            )
        )
    for text in ("../secret", "/etc", "..", "9" * 5000, "²", "\0", "release/../.."):
        every.append(("files", f"a tracker that names {text[:20]!r}", tracker(text)))
    draw.shuffle(every)
    yield from every


def many_entries(entries: zipfile.ZipFile) -> None:
    for number in range(10**5):
        entries.writestr(f"{number}", b"")


def bomb() -> bytes:
    def zeros(entries: zipfile.ZipFile) -> None:
        with entries.open("archive/data/1", "w") as file:
            for _ in range(1000):
                file.write(bytes(1024**2))

    return archive(tensor_pickle(count=262144000, size=(262144000,), key="1"), edit=zeros, packed=True)


def tracker(text: str) -> Attack:
    def apply(folder: Path) -> None:
        (folder / ".metadata").unlink()
        (folder / "latest_checkpointed_iteration.txt").write_text(text)

    return apply


KINDS: dict[str, Callable[[Path], Any]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to a secret": lambda path: path.symlink_to(path.parent.parent / "secret"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "empty": Path.touch,
    "10**13 bytes": lambda path: (path.touch(), os.truncate(path, 10**13)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=150)
    options = parser.parse_args()
    warm.load()
    copyreg.add_extension("os", "system", EXTENSION)
    campaign = Campaign("hostile torch_dist checkpoints", options.seed)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        genuine = home / "genuine"
        make = ["models", "create", "tiny", str(home / "hf")]
        for command in (make, ["convert", str(home / "hf"), str(genuine), "--to", "torch_dist", "--logits", "0"]):
            outcome = warm.run(command, cwd=home)
            assert outcome.code == 0, outcome.stderr
        (genuine / "manifest.json").unlink()
        for number, (category, title, attack) in enumerate(attacks(home / "proof", random.Random(options.seed))):
            if number == options.count:
                break
            case = home / f"case-{number}"
            folder = case / "checkpoint"
            shutil.copytree(genuine, folder)
            (case / "secret").write_text("top secret")
            attack(folder)
            harmless = "common.pt" in title or category == "pickle in common.pt"
            problem = judge(case, folder, home / "proof", refused=not harmless)
            campaign.record(category, title, survived=not problem, observation=problem)
            shutil.rmtree(case)
    return campaign.finish()


def judge(case: Path, folder: Path, proof: Path, *, refused: bool) -> str:
    """What went wrong, in a line; empty if nothing did."""
    outcomes = {
        "convert": (warm.run(["convert", str(folder), "out", "--logits", "0"], cwd=case), refused),
        "inspect": (warm.run(["inspect", str(folder)], cwd=case), False),
    }
    problems = [
        f"{name}: {text}" for name, (outcome, must) in outcomes.items() if (text := outcome.problem(refused=must))
    ]
    if proof.exists():
        proof.unlink()
        problems.append("THE PROOF FILE IS THERE")
    if refused and (case / "out").exists():
        problems.append("an output is there")
    if any(b"top secret" in path.read_bytes() for path in case.glob("out/*") if path.is_file()):
        problems.append("the secret was copied")
    return "; ".join(problems)


if __name__ == "__main__":
    raise SystemExit(main())
