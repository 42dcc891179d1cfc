"""Reads and checks the weights of a Hugging Face directory, each tensor from the shard given by the index."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimectl.architectures.config import raw_config, with_defaults
from slimectl.checkpoints.pickled import PickleFile, pickled_shards
from slimectl.checkpoints.safetensors_io import SafetensorsFile, TensorMemory, TensorSpec
from slimectl.checkpoints.stored_names import name_obstacle, plain_obstacle
from slimectl.errors import CheckpointError
from slimectl.system.liveness import note_progress
from slimectl.system.model_files import check_file, plain_name, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
"""Name suffixes of embeddings."""
COMPARED_ROWS = 4096

TensorFile = SafetensorsFile | PickleFile


class HFWeights:
    """Weights of a Hugging Face directory, read one tensor at a time, into `memory` if it is given.

    A tensor in several shards is read from the shard given by the index. See `check_weights`. Raises CheckpointError.
    """

    def __init__(self, path: Path, memory: TensorMemory | None = None, *, pickled: bool = False) -> None:
        """Open the directory. `pickled`: read pytorch_model.bin if there are no safetensors."""
        self._path = path
        self._memory = memory
        self._pickled = pickled_shards(path) if pickled and not _safetensors(path) else []

    @cached_property
    def _holders(self) -> dict[str, list[TensorFile]]:
        """Return the files that hold each tensor. The first one is read."""
        files: list[TensorFile] = [PickleFile(shard) for shard in self._pickled]
        files = files or [SafetensorsFile(shard, self._memory) for shard in shards(self._path)]
        assigned = {} if self._pickled else _weight_map(self._path)
        holders: dict[str, list[TensorFile]] = {}
        for file in files:
            for name in file.forms():
                position = 0 if assigned.get(name) == file.path.name else len(holders.get(name, ()))
                holders.setdefault(name, []).insert(position, file)
        return holders

    def forms(self) -> Mapping[str, TensorSpec]:
        return {name: files[0].forms()[name] for name, files in self._holders.items()}

    def get(self, name: str) -> Tensor:
        note_progress()
        return self._holders[name][0].get(name)

    def conflicts(self, *, indexed: bool = True) -> Iterator[tuple[str, Path, Path]]:
        """Yield tensors whose values differ between shards: name, the file that is read, and the other file.

        Without `indexed`, leave out tensors that are in the index.
        """
        assigned = {} if indexed else _weight_map(self._path)
        for name, (file, *copies) in self._holders.items():
            for copy in copies if assigned.get(name) != file.path.name else ():
                if not _same_values(file.get(name), copy.get(name)):
                    yield name, file.path, copy.path


def check_weights(path: Path) -> None:
    """Raise CheckpointError for weights that programs read differently, or that contradict config.json.

    Examples are two layouts in one folder, two values of one tensor, names with a wrapper's prefix, and a head that
    differs from the embedding although config.json ties them. Only headers and the tensors in question are read. A
    directory without weights passes, because its weights may be pushed.
    """
    if _safetensors(path):
        _check_weights(path, _stamps(path))
    elif pickled_shards(path):
        shards(path)  # raises with the remedy


@lru_cache(maxsize=16)
def _check_weights(path: Path, stamps: tuple[tuple[str, int, int], ...]) -> None:
    weights = HFWeights(path)
    for name, file, copy in weights.conflicts():
        listed = f". {INDEX} lists the first" if _weight_map(path).get(name) == file.name else ""
        remedy = (
            f"Make a clean copy: slimectl convert {shlex.quote(str(path))} DIR"
            if listed
            else "Download the model again"
        )
        raise CheckpointError(
            f"{path}: {name} comes twice, in {file.name} and {copy.name}, with different values{listed}. Programs read"
            f" different ones. {remedy}"
        )
    if obstacle := name_obstacle(weights.forms(), path):
        raise CheckpointError(f"{path}: {obstacle}")
    if (path / "config.json").is_file():
        check_head(weights, raw_config(path), path)


def check_plain(path: Path) -> None:
    """Raise CheckpointError for quantized weights, which training and the embedded engine do not support."""
    if not _safetensors(path):
        return
    config = raw_config(path) if (path / "config.json").is_file() else {}
    if obstacle := plain_obstacle(_forms(path, _stamps(path)), config, path):
        raise CheckpointError(f"{path}: {obstacle}")


@lru_cache(maxsize=16)
def _forms(path: Path, stamps: tuple[tuple[str, int, int], ...]) -> Mapping[str, TensorSpec]:
    return HFWeights(path).forms()


def check_head(weights: HFWeights, config: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if the head differs from the embedding although config.json ties them."""
    forms = weights.forms()
    ends = [name for name in forms if name.endswith(EMBEDDINGS)]
    if HEAD not in forms or not ends or not _is_tied(config):
        return
    embedding = min(ends, key=len)
    if not _same_values(weights.get(HEAD), weights.get(embedding)):
        raise CheckpointError(
            f"{path}: {HEAD} differs from {embedding}, but they are tied in config.json. Set tie_word_embeddings to "
            f"false in config.json if the model was trained with a separate head, or remove {HEAD}."
        )


def shards(path: Path) -> list[Path]:
    """List the safetensors files of a directory, checked against its index. Raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such model directory. Give a Hugging Face checkpoint directory.")
    if (path / INDEX).exists():
        return _listed_shards(path)
    files = _safetensors(path)
    if not files:
        raise CheckpointError(f"{path}: no model*.safetensors: {_other_layout(path)}")
    for file in files:
        check_file(file)
    return files


def _other_layout(path: Path) -> str:
    """Return what a directory without safetensors is, and the remedy."""
    convert = f"Convert it with `slimectl convert {shlex.quote(str(path))} DIR --to hf`."
    if (path / ".metadata").exists():
        return f"this is a torch_dist checkpoint. {convert}"
    if pickled_shards(path):
        return f"its weights are pickled. {convert}"
    return "this is not a Hugging Face checkpoint. Copy or download its weights."


def _listed_shards(path: Path) -> list[Path]:
    """Return the files in the index, which must all be in the directory itself. Raises CheckpointError."""
    names = sorted(set(_weight_map(path).values()))
    for name in names:
        if not plain_name(name):
            raise CheckpointError(f"{path / INDEX}: lists {name!r:.80}, which is outside {path}. Copy the index again.")
        try:
            check_file(path / name)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: {INDEX} lists {name}, which does not exist. Copy it again.") from None
    if SINGLE not in names and (path / SINGLE).exists():
        raise CheckpointError(
            f"{path}: two models, {SINGLE} and the shards of {INDEX}, which does not list it. Programs read different"
            " ones. Move one of them out of the folder."
        )
    return [path / name for name in names]


def _weight_map(path: Path) -> dict[str, str]:
    """Read which shard holds each tensor. Empty without an index. Raises CheckpointError."""
    if not (path / INDEX).exists():
        return {}
    try:
        weight_map: dict[str, str] = read_json(path / INDEX)["weight_map"]
        set(weight_map.values())  # an index is untrusted, so its values may be lists
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / INDEX}: cannot be read ({error}). Copy the directory again.") from error
    return weight_map


def _safetensors(path: Path) -> list[Path]:
    return sorted(file for file in path.glob("*.safetensors") if file.name.startswith(("model", "pytorch_model")))


def _is_tied(config: dict[str, Any]) -> bool:
    if "tie_word_embeddings" in config:
        return bool(config["tie_word_embeddings"])
    try:
        return bool(with_defaults(config).get("tie_word_embeddings"))
    except CheckpointError:  # an unknown architecture, rejected when it is read
        return False


def _same_values(one: Tensor, two: Tensor) -> bool:
    """Compare tensors of any dtypes, in parts, because an embedding is large."""
    if one.shape != two.shape:
        return False
    if not one.dim():
        return bool(one == two)
    rows = zip(one.split(COMPARED_ROWS), two.split(COMPARED_ROWS), strict=True)
    return all(torch.equal(a.double(), b.double()) for a, b in rows)


def _stamps(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Return names, sizes and modification times of the files that the checks read."""
    files = [file for file in path.iterdir() if file.suffix in (".safetensors", ".json")]
    statuses = [(file.name, file.stat()) for file in files]
    return tuple(sorted((name, status.st_size, status.st_mtime_ns) for name, status in statuses))
