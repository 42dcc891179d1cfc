"""Saves and loads model and optimizer: as a Hugging Face directory, or in torch_dist by mcore's dist_checkpointing.

mcore (0.16.1) reshards both over tensor, pipeline and data sizes.
"""

from __future__ import annotations

import io
import os
import queue
import shlex
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, serialization
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.utils import _ReaderView
from torch.nn.functional import pad

from slimectl.architectures.mapping import ParamMapping, Shape, stacked_shapes
from slimectl.checkpoints.torch_dist.archive import FileRange, check_stored
from slimectl.checkpoints.torch_dist.mapping import CARRIED
from slimectl.checkpoints.torch_dist.metadata import read_metadata
from slimectl.errors import CheckpointError, first_line
from slimectl.policies.checkpoint import (
    OPTIMIZER,
    CarriedWeights,
    copy_companions,
    read_tensors,
    write_trainer,
)
from slimectl.policies.lora import read_adapter
from slimectl.policies.megatron.master_weights import PARAM
from slimectl.policies.megatron.optimizer import drop_gradients, inners, set_options
from slimectl.policies.megatron.parameters import DistributedParameters
from slimectl.policies.moments import MOMENTS
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.system.model_files import check_file, check_model_files, open_file, trainer_folder

CONTENT = {
    # Every moment has the shape of its parameter, the only form that can be resharded.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""Metadata that mcore stores with a checkpoint and needs on loading."""
# megatron-core 0.16.1 calls functions that torch 2.13 deprecates. Delete when it does not.
for _message in (r"`load_state_dict` is deprecated", r"Please use DTensor instead"):
    warnings.filterwarnings("ignore", _message, FutureWarning)
# Our files are in the staging folder before mcore writes there. They are not an old checkpoint.
serialization.logger.addFilter(lambda record: not str(record.msg).startswith("Overwriting old"))

MAX_OBJECT_BYTES = 1024**3
"""Size limit of an object that is not a tensor: schedules, random states, the state of fp8 modules."""


def save_torch_dist(
    path: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: Any,
    *,
    companions: Path,
    carried: CarriedWeights,
    trainer_state: dict[str, Any],
) -> None:
    """Write the weights, masters, moments and counts of all ranks into the existing folder `path`.

    Config and tokenizer are copied from `companions`, so that the folder is a model. The ranks divide the `carried`
    tensors among them and write them unchanged.
    """
    _init_moments(optimizer)
    counts = {name: trainer_state[name] for name in ("step", "updates")}
    state = _state(chunks, optimizer, CONTENT, loading=False) | {"slimectl": counts}
    names = carried.names[dist.get_rank() :: dist.get_world_size()]
    state |= {CARRIED + name: ShardedTensor.from_rank_offsets(CARRIED + name, carried.get(name)) for name in names}
    with _write_in_process():
        dist_checkpointing.save(state, str(path), content_metadata=CONTENT)
    if dist.get_rank() == 0:
        copy_companions(companions, path, chunks[0].module.config.params_dtype, carried)
        write_trainer(path, **trainer_state)
    dist.barrier()


def load_torch_dist(
    path: Path, chunks: Sequence[DistributedDataParallel], optimizer: Any, options: OptimizerOptions
) -> tuple[int, int]:
    """Load all of this for the current layout, with `options` for the optimizer. Returns steps and updates.

    Raises CheckpointError.
    """
    _init_moments(optimizer)
    try:
        with _plain_data_only(path):
            content = dist_checkpointing.load_content_metadata(str(path))
            loaded = dist_checkpointing.load(_state(chunks, optimizer, content or {}, loading=True), str(path))
        step, updates = (int(loaded["slimectl"][name]) for name in ("step", "updates"))
    except (Exception, CheckpointException) as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        line = first_line(cause)
        raise CheckpointError(
            f"{path}: cannot be resumed from as a torch_dist checkpoint ({line}). Convert its weights instead: slimectl"
            f" convert {shlex.quote(str(path))} DIR --to hf"
        ) from error
    for name, chunk in _named_chunks(chunks):
        chunk.module.load_state_dict(loaded[name])
    with _per_parameter_steps(optimizer, updates):
        optimizer.load_state_dict(loaded["optimizer"])
    set_options(optimizer, options)
    drop_gradients(chunks, optimizer)
    return step, updates


@contextmanager
def _plain_data_only(folder: Path) -> Iterator[None]:
    """Let mcore load `folder` without executing code in it. Raises CheckpointError for files outside of it.

    mcore (0.16.1) and torch (2.13) read `.metadata` with pickle.load, and other non-tensor objects with torch.load and
    weights_only=False. Both execute code from an untrusted file. Within this context, this package reads `.metadata`,
    and every torch.load accepts only plain data, from the same bytes that were checked. Delete when both read safely.
    """
    check_model_files(folder)
    load, reads = torch.load, FileSystemReader.read_metadata

    def load_plain(source: Any, *args: Any, **options: Any) -> Any:
        view, length = _open_view(source)
        check_stored(view, length)
        return load(view, *args, **{**options, "weights_only": True, "pickle_module": None})

    def read_plain(reader: FileSystemReader, *_: Any, **__: Any) -> Any:
        metadata = read_metadata(Path(reader.path))
        for name in {location.relative_path for location in metadata.storage_data.values()}:
            check_file(Path(reader.path) / name)
        return metadata

    torch.load, FileSystemReader.read_metadata = load_plain, read_plain  # type: ignore[method-assign, assignment]
    try:
        # TransformerEngine keeps a module's state as bytes.
        with torch.serialization.safe_globals([io.BytesIO]):
            yield
    finally:
        torch.load, FileSystemReader.read_metadata = load, reads  # type: ignore[method-assign]


def _open_view(source: Any) -> tuple[Any, int]:
    """Return a view of what mcore passes to torch.load (a path, part of an open file, or bytes) and its length."""
    if isinstance(source, _ReaderView):
        stream: Any = source.base_stream
        return FileRange(stream, source.offset, source.len), source.len
    if isinstance(source, str | os.PathLike):
        with open_file(Path(source)) as file:
            source = io.BytesIO(file.read(MAX_OBJECT_BYTES + 1))
    length: int = source.seek(0, os.SEEK_END)
    if length > MAX_OBJECT_BYTES:
        raise ValueError(f"an object of over {MAX_OBJECT_BYTES} bytes")
    return FileRange(source, 0, length), length


def _named_chunks(chunks: Sequence[DistributedDataParallel]) -> list[tuple[str, DistributedDataParallel]]:
    """Pair the chunks with mcore's names for them."""
    return [("model" if len(chunks) == 1 else f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _state(chunks: Sequence[Any], optimizer: Any, content: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    models = {name: chunk.module.sharded_state_dict(metadata=dict(content)) for name, chunk in _named_chunks(chunks)}
    with _padded_buckets(optimizer):
        return models | {"optimizer": optimizer.sharded_state_dict(models, is_loading=loading, metadata=dict(content))}


@contextmanager
def _padded_buckets(optimizer: Any) -> Iterator[None]:
    """Keep the padding between buckets in the tensors that mcore splits into the parameters' states.

    megatron-core (0.16.1) uses offsets with padding on tensors without it. After the first padded bucket (there are
    several if a pipeline's ends share the embedding) all masters and moments are shifted. Delete when its
    sharded_param_state_fully_reshardable warns of no range that exceeds the buffer.
    """
    parts = [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]
    for part in parts:
        part.get_parameter_state_dp_zero = partial(_parameter_state_with_padding, part)
    try:
        yield
    finally:
        for part in parts:
            vars(part).pop("get_parameter_state_dp_zero", None)


def _parameter_state_with_padding(part: DistributedOptimizer, **options: Any) -> Any:
    state = DistributedOptimizer.get_parameter_state_dp_zero(part, **options)
    for i, buffer in enumerate(part.buffers if state is not None else ()):
        sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
        paddings = [bucket.grad_data.numel() - size for bucket, size in zip(buffer.buckets, sizes, strict=True)]
        for tensors in state[i].values() if any(paddings[:-1]) else ():
            for name in ("param", *MOMENTS):
                buckets = zip(tensors[name].split(sizes), paddings, strict=True)
                tensors[name] = torch.cat([pad(bucket, (0, padding)) for bucket, padding in buckets])
    return state


@contextmanager
def _write_in_process() -> Iterator[None]:
    """Make mcore write files in this process.

    megatron-core (0.16.1) forks writers, and starts a manager process that outlives them. A rank is a daemon, which
    cannot have children and exits without stopping any. Delete when a synchronous save starts no process.
    """
    forks, results = FileSystemWriterAsync.write_preloaded_data_multiproc, filesystem_async._results_queue
    FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write)
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(forks)
        filesystem_async._results_queue = results


def _write(transforms: Any, use_msc: bool, rank: int, buckets: Sequence[Any], results: queue.Queue[Any]) -> None:
    """Replace FileSystemWriterAsync.write_preloaded_data_multiproc: write one file after another."""
    result_queue: queue.Queue[tuple[int, Any]] = queue.Queue()
    for i, bucket in enumerate(buckets):
        waiting: queue.Queue[int] = queue.Queue()
        waiting.put(i)
        FileSystemWriterAsync.write_preloaded_data(transforms, i, bucket, result_queue, waiting, True, use_msc=use_msc)
    results_by_bucket = dict(result_queue.get() for _ in buckets)
    failures = [result for result in results_by_bucket.values() if isinstance(result, Exception)]
    results.put(failures[0] if failures else results_by_bucket)


def _init_moments(optimizer: Any) -> None:
    """Create zero moments for torch's AdamW before its first update.

    megatron-core (0.16.1) reads the step count from them. Delete when it saves an optimizer without moments.
    """
    for inner in inners(optimizer):
        if isinstance(inner, torch.optim.AdamW):
            dtype = getattr(inner, "moment_dtype", torch.float32)
            for master in [master for group in inner.param_groups for master in group["params"]]:
                if not inner.state[master]:
                    inner.state[master] = {
                        "step": torch.zeros((), device=master.device),
                        "exp_avg": torch.zeros_like(master, dtype=dtype),
                        "exp_avg_sq": torch.zeros_like(master, dtype=dtype),
                    }


@contextmanager
def _per_parameter_steps(optimizer: Any, updates: int) -> Iterator[None]:
    """Set a separate step count for every parameter of torch's AdamW while states are loaded.

    megatron-core (0.16.1) has no count to copy into the parameters' states (KeyError: 'step'), and then shares one
    tensor between them, so each would also count the others' updates. Delete when
    DistributedOptimizer.load_state_dict does this itself.
    """
    parts = [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]
    for part in (part for part in parts if isinstance(part.optimizer, torch.optim.AdamW)):
        part._set_main_param_and_optimizer_states = partial(_set_state_with_step, part, torch.tensor(float(updates)))
    try:
        yield
    finally:
        for part in parts:
            vars(part).pop("_set_main_param_and_optimizer_states", None)
    for inner in inners(optimizer):
        if isinstance(inner, torch.optim.AdamW):
            for master, slots in inner.state.items():
                slots["step"] = torch.tensor(float(updates), device=master.device)


def _set_state_with_step(
    part: DistributedOptimizer, step: torch.Tensor, parameter: Any, tensors: dict[str, Any]
) -> None:
    DistributedOptimizer._set_main_param_and_optimizer_states(part, parameter, {**tensors, "step": step})


def load_adapter(path: Path, state: DistributedParameters, links: Iterable[ParamMapping]) -> None:
    """Load this rank's part of the tensors of `links` from a folder in peft's format. Raises CheckpointError."""
    local_links = state.mine(links)
    stream = read_adapter(path, shapes_of(local_links))
    for link in local_links:
        parts = dict(next(stream) for _ in link.hf)
        state.assign(link, PARAM, parts.__getitem__)


def load_moments(path: Path, state: DistributedParameters, updated: Iterable[ParamMapping], *, updates: int) -> None:
    """Load this rank's part of the moments of `updated`. `updates` is the step count. Raises CheckpointError."""
    updated = list(updated)
    local_links, shapes = state.mine(updated), stacked_shapes(moment_shapes(updated))
    local = moment_shapes(local_links)
    stream = read_tensors(trainer_folder(path) / OPTIMIZER, {name: shapes[name] for name in stacked_shapes(local)})
    waiting: dict[str, Tensor] = {}

    def read(name: str) -> Tensor:
        while name not in waiting:
            source, tensor = next(stream)
            parts = {source: tensor} if source in local else {f"{source}.{e}": part for e, part in enumerate(tensor)}
            waiting.update((part, value) for part, value in parts.items() if part in local)
        return waiting.pop(name)

    for link in local_links:
        for moment in MOMENTS:
            parts = {name: read(f"{moment}.{name}") for name in link.hf}
            state.assign(link, moment, parts.__getitem__, updates=updates)


def shapes_of(links: Iterable[ParamMapping]) -> dict[str, Shape]:
    """Return the shapes of the Hugging Face tensors of the links, in order."""
    return {name: shape for link in links for name, shape in zip(link.hf, link.shapes, strict=True)}


def moment_shapes(links: Iterable[ParamMapping]) -> dict[str, Shape]:
    """Return the shapes of the moments, in the order of DistributedParameters.each."""
    return {
        f"{moment}.{name}": shape
        for link in links
        for moment in MOMENTS
        for name, shape in zip(link.hf, link.shapes, strict=True)
    }
