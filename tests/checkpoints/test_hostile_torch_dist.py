"""A torch_dist checkpoint of a stranger: one line, and none of its commands ever runs."""

from __future__ import annotations

import copyreg
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from checkpoints.hostile_pickles import EXTENSION, archive, payloads, tensor_pickle, text

from slimectl.checkpoints.torch_dist.metadata import is_torch_dist, read_metadata
from slimectl.checkpoints.torch_dist.reader import TorchDistReader
from slimectl.checkpoints.torch_dist.tables import MAX_SIZE
from slimectl.checkpoints.torch_dist.writer import Chunk, write_torch_dist
from slimectl.errors import CheckpointError

ATTACKS = sorted(payloads(Path("proof")))
BY_COST = [pytest.param(a, marks=pytest.mark.slow if a == "a tuple 200 000 deep" else ()) for a in ATTACKS]
Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor "a" of 4 x 64 in two chunks."""
    folder = tmp_path_factory.mktemp("genuine")
    whole = torch.arange(256.0).view(4, 64)
    rows = [(0, 2), (2, 4)]
    chunks = [Chunk("a", (4, 64), (i, 0), (2, 64), torch.float32, lambda i=i, j=j: whole[i:j].clone()) for i, j in rows]
    write_torch_dist(folder, chunks)
    return folder


@pytest.fixture
def folder(tmp_path: Path, genuine: Path) -> Path:
    return copytree(genuine, tmp_path / "checkpoint")


@pytest.fixture
def registered() -> Iterator[None]:
    copyreg.add_extension("os", "system", EXTENSION)
    yield
    copyreg.remove_extension("os", "system", EXTENSION)


def refusal(folder: Path) -> str:
    """The line in which reading the tensor "a" is refused."""
    with pytest.raises(CheckpointError) as error:
        TorchDistReader(folder).read("a", (0, 0), (4, 64))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert str(folder) in str(error.value)
    return str(error.value)


def changed(folder: Path, change: Change) -> None:
    """Rewrite the metadata as an attacker can who has a pickler."""
    metadata = read_metadata(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("attack", BY_COST)
def test_metadata_that_would_run_a_command_is_refused_in_a_line(attack: str, folder: Path, tmp_path: Path):
    hostile = payloads(tmp_path / "proof")[attack]
    for data in (hostile, hostile.removesuffix(b".") + b"0" + (folder / ".metadata").read_bytes()):
        (folder / ".metadata").write_bytes(data)
        assert ".metadata: cannot be read (" in refusal(folder)
    assert not (tmp_path / "proof").exists()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_chunk_that_would_run_a_command_is_refused_in_a_line(attack: str, folder: Path, tmp_path: Path):
    chunk = archive(payloads(tmp_path / "proof")[attack])
    (folder / "__0_0.distcp").write_bytes(chunk)
    changed(folder, lambda metadata: [point_to(place, 0, len(chunk)) for place in metadata.storage_data.values()])
    assert "__0_0.distcp: cannot be read (" in refusal(folder)
    assert not (tmp_path / "proof").exists()


def point_to(place: Any, offset: int, length: int) -> None:
    place.offset, place.length = offset, length


def test_the_tensor_of_a_genuine_archive_is_read(folder: Path):
    chunk = archive(tensor_pickle(size=(2, 64), stride=(64, 1)))
    (folder / "__0_0.distcp").write_bytes(chunk)
    changed(folder, lambda metadata: [point_to(place, 0, len(chunk)) for place in metadata.storage_data.values()])
    assert TorchDistReader(folder).read("a", (0, 0), (4, 64)).shape == (4, 64)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (archive(tensor_pickle(count=10**12, size=(2, 64), stride=(64, 1))), "record size"),
        (archive(tensor_pickle(size=(2, 64), stride=(0, 0))), "bytes for a tensor"),
        (archive(tensor_pickle(size=(2, 64), stride=(64, 1), offset=10**9)), ""),
        (archive(tensor_pickle(size=(2, 64), stride=(64, 1), offset=-64)), ""),
        (archive(tensor_pickle(size=(2, -64), stride=(64, 1))), ""),
        (archive(tensor_pickle(size=(10**9, 10**9), stride=(0, 0))), "is torch.float32"),
        (archive(tensor_pickle(size=(2, 64), stride=(64, 1), kind="DoubleStorage")), ""),
        (archive(tensor_pickle(size=(2, 64), stride=(64, 1), kind="ComplexFloatStorage")), "is not allowed in"),
        (archive(tensor_pickle(size=(2, 64), stride=(64, 1), key="../../../etc/passwd")), ""),
        (archive(tensor_pickle(size=(2, 64), stride=(64, 1)), packed=True), "a compressed entry"),
        (archive(b"\x80\x02]."), "instead of a tensor"),
        (archive(b"\x80\x02" + text("a") + b"."), "instead of a tensor"),
        (archive(tensor_pickle(), edit=lambda zip: zip.writestr("other/data.pkl", b"N.")), "no pickle of a tensor"),
        (archive(tensor_pickle(), edit=lambda zip: zip.writestr("/etc/data.pkl", b"N.")), "no pickle of a tensor"),
        (archive(tensor_pickle(), edit=lambda zip: [zip.writestr(f"{i:09}", b"") for i in range(1200)]), "table of"),
        (archive(tensor_pickle())[:-4], "the end is not that of"),
        (bytes(2000), "the end is not that of"),
        (b"PK", "bytes for a tensor"),
    ],
)
def test_an_archive_that_is_no_plain_tensor_is_refused(chunk: bytes, message: str, folder: Path):
    (folder / "__0_0.distcp").write_bytes(chunk)
    changed(folder, lambda metadata: [point_to(place, 0, len(chunk)) for place in metadata.storage_data.values()])
    assert message in refusal(folder)


def test_an_entry_that_comes_twice_is_refused(folder: Path):
    def twice(entries: zipfile.ZipFile) -> None:
        with pytest.warns(UserWarning, match="Duplicate name"):
            entries.writestr("archive/data.pkl", tensor_pickle())

    chunk = archive(tensor_pickle(), edit=twice)
    (folder / "__0_0.distcp").write_bytes(chunk)
    changed(folder, lambda metadata: [point_to(place, 0, len(chunk)) for place in metadata.storage_data.values()])
    assert "a duplicate entry" in refusal(folder)


def every_place(**fields: Any) -> Change:
    def change(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            for name, value in fields.items():
                setattr(place, name, value)

    return change


def every_chunk(**fields: Any) -> Change:
    def change(metadata: Any) -> None:
        for chunk in metadata.state_dict_metadata["a"].chunks:
            for name, value in fields.items():
                setattr(chunk, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (every_place(relative_path="../secret"), "'../secret', which is not a file of the folder"),
        (every_place(relative_path="/etc/passwd"), "'/etc/passwd', which is not a file of the folder"),
        (every_place(relative_path=".."), "which is not a file of the folder"),
        (every_place(relative_path="a\0b"), "which is not a file of the folder"),
        (every_place(relative_path=7), "which is not a file of the folder"),
        (every_place(relative_path="not-there.distcp"), "No such file"),
        (every_place(offset=-1), "an offset that is not a number from 0"),
        (every_place(offset=2**70), "an offset that is not a number from 0"),
        (every_place(offset=MAX_SIZE), "truncated"),
        (every_place(length=True), "an length that is not a number from 0"),
        (every_place(length=float("nan")), "an length that is not a number from 0"),
        (every_place(length=8), "8 bytes for a tensor [2, 64]"),
        (every_place(transform_descriptors=["zstd"]), "is stored zstd-encoded"),
        (every_place(transform_descriptors=7), "transform_descriptors that are not a list"),
        (every_chunk(offsets=torch.Size([0, 0])), "chunks of a overlap at [0, 0]"),
        (every_chunk(offsets=torch.Size([0])), "a chunk of 2 dimensions in a tensor of 2"),
        (every_chunk(sizes=torch.Size([2**40, 64])), f"a chunk [{2**40}, 64] at"),
        (every_chunk(sizes=torch.Size([2] * 17)), "a shape that is not a list of up to 16 numbers"),
        (every_chunk(sizes=(2, -64)), "a size that is not a number"),
        (every_chunk(sizes="a"), "a shape that is not a list"),
        (lambda metadata: setattr(metadata.state_dict_metadata["a"], "chunks", None), "chunks that are not a list"),
        (lambda metadata: setattr(metadata.state_dict_metadata["a"].properties, "dtype", torch.complex64), "complex64"),
        (lambda metadata: setattr(metadata, "storage_data", None), "instead of a dictionary"),
        (lambda metadata: setattr(metadata, "storage_data", {}), "lacks the chunk at [0, 0]"),
        (lambda metadata: metadata.state_dict_metadata.update({("a",): None}), "neither a string nor a small number"),
        (lambda metadata: metadata.state_dict_metadata.update({7: None}), "a key that is not a string"),
    ],
)  # fmt: skip
def test_metadata_beyond_its_types_and_bounds_is_refused(change: Change, message: str, folder: Path):
    (folder.parent / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    changed(folder, change)
    assert message in refusal(folder)


def test_a_chunk_behind_a_link_out_of_the_folder_a_fifo_or_a_device_is_not_read(folder: Path):
    chunk = folder / "__0_0.distcp"
    chunk.rename(folder.parent / "secret")
    chunk.symlink_to("../secret")
    assert "__0_0.distcp: a link out of its folder, to " in refusal(folder)
    chunk.unlink()
    os.mkfifo(chunk)
    assert "__0_0.distcp: a FIFO, not a file" in refusal(folder)
    chunk.unlink()
    chunk.symlink_to("/dev/zero")
    assert "a link out of its folder, to /dev/zero" in refusal(folder)
    chunk.unlink()
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")
    assert ".metadata: a FIFO, not a file" in refusal(folder)


def test_a_tracker_leads_to_a_folder_beside_it_only(folder: Path, tmp_path: Path):
    folder.rename(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    tracker = tmp_path / "run" / "latest_checkpointed_iteration.txt"
    for words in ("../elsewhere", "/etc", "..", "²", "9" * 5000, "\0"):
        tracker.write_text(words)
        with pytest.raises(CheckpointError, match=r"which is not a folder next to it|which does not exist"):
            TorchDistReader(tmp_path / "run")
    (tmp_path / "run" / "metadata.json").write_text("[" * 10**6)
    tracker.unlink()
    with pytest.raises(CheckpointError, match="nested too deeply"):
        is_torch_dist(tmp_path / "run")


def test_placeholders_of_megatron_are_nothing_but_their_names(folder: Path):
    """Whoever wrote them: mcore's own objects in metadata are not needed, so they stay what the file says."""
    import pickletools

    from slimectl.checkpoints.torch_dist.pickle_tree import Construction, Reference, parse_pickle

    data = b"\x80\x04" + text("megatron.core.transformer") + text("Config") + b"\x93)\x81}" + text("a") + b"K\x01sb."
    assert [opcode.name for opcode, _, _ in pickletools.genops(data)][-1] == "STOP"
    tree = parse_pickle(data, allowed=(), placeholders=("megatron",))
    assert isinstance(tree, Construction)
    assert (tree.reference, tree.state) == (Reference("megatron.core.transformer", "Config"), {"a": 1})
    assert json.dumps(tree.state) == '{"a": 1}'
