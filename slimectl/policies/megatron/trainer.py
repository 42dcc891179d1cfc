"""Trains a model sharded over ranks with Megatron-core: micro-batches, updates, weights and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from slimectl.architectures.config import read_config
from slimectl.architectures.mapping import ParamMapping, published_shapes, stacked, stacked_shapes
from slimectl.architectures.parallel import prefix_obstacle
from slimectl.architectures.registry import family_of
from slimectl.checkpoints.base_model import fingerprint
from slimectl.checkpoints.torch_dist.metadata import is_torch_dist
from slimectl.checkpoints.validate import UnfusedExperts, inventory
from slimectl.errors import SettingsError
from slimectl.policies.checkpoint import (
    OPTIMIZER,
    CarriedWeights,
    copy_companions,
    new_trainer_folder,
    read_trainer,
    write_float32,
    write_trainer,
)
from slimectl.policies.determinism import in_kernels
from slimectl.policies.host_memory import HostMemory
from slimectl.policies.lora import FOLDER, LoraOptions, base_of, write_adapter
from slimectl.policies.megatron import checkpoint, model, optimizer, parallel, parameters
from slimectl.policies.megatron.batch import MicroBatch, laid_out, shares
from slimectl.policies.megatron.config import FP8_TOKENS
from slimectl.policies.megatron.hooks import UserFunctions
from slimectl.policies.megatron.lora import Adapters
from slimectl.policies.megatron.master_weights import PARAM, masters
from slimectl.policies.megatron.moe import MoEAuxLossScaler
from slimectl.policies.megatron.own_model import check_parameters
from slimectl.policies.megatron.parallel import per_row, totals
from slimectl.policies.megatron.parameters import DistributedParameters, trained_links
from slimectl.policies.megatron.routing_replay import RolloutRoutingReplay, RoutingReplay
from slimectl.policies.moments import MOMENTS
from slimectl.policies.onednn_linear import ROWS, is_faster
from slimectl.policies.optimizer import lr_at, trainable_names
from slimectl.policies.options import MegatronOptions, TrainerOptions
from slimectl.policies.out_of_memory import MeasuresPacks, PackFitter, optimizer_error, unless_out_of_memory
from slimectl.policies.pack_plan import PackPlan, available_columns, check_vocabulary, plan_pack
from slimectl.policies.routed_experts import RoutingShape
from slimectl.policies.saving import SaveStreams, StreamSaver, reads_moments
from slimectl.protocols import Adapter, CheckpointFormat, Weights
from slimectl.types import Metrics, TrainingSample

_QUIET = (
    # megatron-core 0.16.1 uses collective names that torch 2.13 deprecates. Delete when it does not.
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning),
    # The model is frozen, because it is a reference.
    (r"WARNING: there is no optimizer on RANK", UserWarning),
    # Advice for GPUs that is also printed without one.
    *([] if torch.cuda.is_available() else [(r"When using sequence parallelism it is recommended", UserWarning)]),
)
for _message, _category in _QUIET:
    warnings.filterwarnings("ignore", _message, _category)

Evaluate = Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""(batch, hidden states) on the last stage: the loss of a micro-batch and its metrics."""


class MegatronTrainer(StreamSaver, MeasuresPacks):
    """Base class of policies and critics: everything except the computation on the hidden states.

    Every rank of torch.distributed's group (or only this process) builds a trainer and makes the same calls.
    Checkpoints have the same files as the FSDP policy's. Either trainer loads them, with any layout.
    """

    def __init__(
        self,
        model_dir: Path,
        checkpoint: CheckpointFormat,
        options: TrainerOptions = TrainerOptions(),
        megatron: MegatronOptions = MegatronOptions(),
        user_functions: UserFunctions | None = None,
    ) -> None:
        """Raises SettingsError or CheckpointError."""
        if options.lora is not None and megatron.save_format != "hf":
            raise SettingsError(
                f"megatron.save_format: {megatron.save_format} cannot store adapters. Set hf with train.lora_rank, then"
                " convert."
            )
        self.model_dir, self.checkpoint = Path(model_dir), checkpoint
        self.options, self.megatron, self.layout = options, megatron, megatron.layout
        self.step = self.updates = 0
        self._calls: list[tuple[Sequence[TrainingSample], parallel.Finish]] = []
        """Calls whose gradients have been added up since the last update."""
        self.memory = HostMemory()
        config = read_config(self.model_dir)
        family = family_of(config)
        self.family, self.architecture = family, family.architecture(config)
        self.prefix_obstacle = prefix_obstacle(self.architecture.transformer, megatron.args)
        self.links = [*family.links(config), *self._extra_links()]
        self.shapes = published_shapes(self.links)
        self.adapters = None if options.lora is None else Adapters(options.lora, self.links, megatron.args)
        self.base_dir = self.model_dir
        grouped = dist.is_available() and dist.is_initialized()
        self.ranks = dist.get_world_size() if grouped else 1
        # Several ranks wait for each other within a pack, or divide the rows by the same limit.
        self.fitter = PackFitter(options, retries=self.ranks == 1, ranks=self.layout.context)
        parallel.check(self.layout, self.architecture, self.ranks)
        self.trained = self._trainable_names() if options.trains else set()
        self.device = model.device()
        self._check_device(options.device)
        parallel.start(self.layout, options.seed)
        self.user_functions = user_functions
        if user_functions is not None:
            user_functions.begin()
        self._build()
        self.balance = MoEAuxLossScaler(self.chunks)
        self.replay = None
        if megatron.routing_replay:
            RoutingShape.of_config(config, setting="megatron.use_routing_replay")
            self.replay = RoutingReplay(self.chunks)
        if options.rollout_routing_replay:
            self.replay = RolloutRoutingReplay(self.chunks, RoutingShape.of_config(config))
        self.carried = self._read_weights(self.model_dir)
        if self.adapters is not None:
            self.adapters.begin(self.state, options.seed)

    def _check_device(self, device: str | None) -> None:
        """Raise SettingsError if the settings ask for another kind of device than Megatron-core uses."""
        if device is not None and torch.device(device).type != self.device.type:
            raise SettingsError(
                f"train.device: {device}, but Megatron-core uses the GPU if there is one. Hide it with"
                " CUDA_VISIBLE_DEVICES= or set train.device to auto."
            )

    def _trainable_names(self) -> set[str]:
        """Return the Megatron names of the trainable parameters."""
        if self.adapters is not None:
            return {link.megatron for link in [*self.adapters.links, *self._extra_links()]}
        names = (name for link in self.links for name in link.hf)
        trained = trainable_names(names, freeze=self.options.freeze, train_only=self.options.train_only)
        frozen = {link.megatron for link in self.links if link.frozen}
        return trained_links(self.links, trained) - self._unused_names() - frozen

    def _build(self) -> None:
        provide = None if self.user_functions is None else self.user_functions.provide
        bare = model.build(self.architecture, self.options, self.megatron, provide)
        if not all(isinstance(chunk, model.PackedGPT) for chunk in bare):
            self.prefix_obstacle = self.prefix_obstacle or "a model from a provider does not share prefixes"
            check_parameters(parameters.local_parameters(bare), self.links, self.layout)
        self._add_modules(bare)
        links = self.links
        if self.adapters is not None:
            self.adapters.attach(bare, self.device)
            links = [*links, *self.adapters.links]
        if self.trained and bare[0].pre_process:
            bare[0].embedding.register_forward_hook(_with_gradient)
        local = parameters.local_parameters(bare)
        local = {link.megatron: local[link.megatron] for link in links if link.megatron in local}
        copy = parameters.tied_copy(bare)
        for name, tensor in [*local.items(), *([(parameters.EMBEDDING, copy)] if copy is not None else [])]:
            tensor.requires_grad_(isinstance(tensor, torch.nn.Parameter) and name in self.trained)
        self.chunks = optimizer.wrapped(bare, self.megatron)
        self.last = bare[-1]
        self.optimizer = optimizer.build(self.chunks, self.options.optimizer, self.megatron)
        local_masters = masters([*local.values(), *([copy] if copy is not None else [])], self.optimizer)
        copy_master = local_masters.pop() if copy is not None else None
        self.state = DistributedParameters(
            links,
            dict(zip(local, local_masters, strict=True)),
            copy_master,
            self.device,
            value=lambda tensor: self.memory.value(tensor),
        )
        self.updated = [link for link in links if link.megatron in self.trained and not link.buffer]

    @property
    def row_multiple(self) -> int:
        """Return a number that divides the tokens of every pack."""
        config = self.chunks[0].config
        if config.fp8:
            return FP8_TOKENS
        # Experts accept any number of tokens, and their routing is recorded for every token.
        is_fast = is_faster(self.device, config.params_dtype) and self.layout.tensor == 1
        return ROWS if is_fast and not config.num_moe_experts else 1

    def _read_weights(self, path: Path) -> CarriedWeights:
        """Load the weights of a directory. Returns the tensors in it that training does not use."""
        weights = UnfusedExperts(self._open_weights(path), self.family)
        stored = inventory(weights.forms(), self.links, self.family, str(path))
        self.names = stored.names
        for link in self.state.mine(self.links):
            self.state.assign(link, PARAM, weights.get)
        return CarriedWeights(weights, stored.carried)

    def _extra_links(self) -> list[ParamMapping]:
        """Return links of the modules that a subclass adds to the model."""
        return []

    def _add_modules(self, chunks: Sequence[model.PackedGPT]) -> None:
        """Build the additional modules that this rank holds."""

    def _unused_names(self) -> set[str]:
        """Return the Megatron names of the parameters that a subclass does not use."""
        return set()

    def _open_weights(self, path: Path) -> Weights:
        return self.checkpoint.open(path)

    @property
    def weight_version(self) -> str:
        return str(self.step)

    @in_kernels
    def run(self, rows: Sequence[TrainingSample], finish: parallel.Finish, *, forward_only: bool) -> list[Any] | None:
        """Return outputs of `finish` for this rank's share of the rows, on the last stage (see parallel.run).

        Returns None if a pack did not fit into memory and the next ones are smaller. Routing is recorded in a run
        without gradients and replayed in one with them. The engine's is replayed in both.
        """
        self.memory.wake()
        if not rows:
            return []
        names = None if forward_only else available_columns(rows)
        check_vocabulary(rows, self.architecture.vocab_size)
        records = self.replay is not None and self.replay.records and forward_only
        if self.replay:
            self.replay.check(rows)
        shares_prefixes = self.options.share_prefixes and not self.prefix_obstacle
        packs_by_rank = shares(
            rows,
            self.layout,
            max_tokens=self.fitter.planning.max_tokens_per_pack,
            data=self.layout.data(self.ranks),
            share=shares_prefixes,
            batching=self.fitter.planning.batching,
            # A recorded pass routes freely, so a token has one routing even if several rows share it.
            marks=self.replay.marks(rows) if self.replay and shares_prefixes and not records else None,
        )
        if self.replay and records:
            self.replay.begin(rows, packs_by_rank)
        self.balance.begin(rows, sum(bool(pack) for share in packs_by_rank for pack in share))
        packs = packs_by_rank[parallel_state.get_data_parallel_rank()]
        plans = [plan_pack(rows, pack, names, vocabulary=self.architecture.vocab_size) for pack in packs]
        for part in self.chunks:
            part.train(not forward_only)  # no dropout for log-probabilities and values, even if megatron.args sets it
        outputs = unless_out_of_memory(partial(self._run_plans, plans, finish, forward_only, records))
        if self.replay:
            self.replay.end(recorded=records and outputs is not None)
        if outputs is None:
            self.fitter.adapt(plans, trains=not forward_only)
        return outputs

    def _run_plans(
        self, plans: Sequence[PackPlan], finish: parallel.Finish, forward_only: bool, records: bool
    ) -> list[Any]:
        rank = parallel_state.get_context_parallel_rank()
        batches = [
            laid_out(plan, self.layout, rank=rank, device=self.device, multiple=self.row_multiple) for plan in plans
        ]

        def forward(batch: MicroBatch, chunk: int) -> Tensor:
            self.balance.weigh(batch)
            if self.replay and not records:
                self.replay.replay(batch, chunk)
            hidden = self.chunks[chunk](batch.tokens_T, batch.sequences)
            if self.replay and records:
                self.replay.record(batch, chunk)
            return hidden

        return parallel.run(self.chunks, batches, finish, forward=forward, forward_only=forward_only)

    def of_rows(self, rows: Sequence[TrainingSample], finish: parallel.Finish) -> list[list[Any]]:
        """Return outputs of `finish` for every row, without gradients, on every rank."""
        outputs = None
        while outputs is None:
            outputs = self.run(rows, finish, forward_only=True)
        return per_row(outputs, len(rows))

    def summed(self, rows: Sequence[TrainingSample], evaluate: Evaluate) -> Metrics:
        """Accumulate the gradient of the loss over all rows. Returns loss and metrics, summed in float64.

        If a pack does not fit into memory, everything since the last update is computed again with smaller packs.
        """

        def finish(batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            value, metrics = evaluate(batch, hidden)
            return value, {name: part.detach().double() for name, part in {**metrics, "loss": value}.items()}

        self._calls.append((rows, finish))
        outputs = self.run(rows, finish, forward_only=False)
        while outputs is None:
            optimizer.drop_gradients(self.chunks, self.optimizer)
            for call in self._calls:
                if (outputs := self.run(self.fitter.kept(call[0]), call[1], forward_only=False)) is None:
                    break
        missing = len(self.fitter.left_out)
        return totals(outputs) | ({"samples_left_out": float(missing)} if missing else {})

    def before_step(self, rollout_id: int, step_id: int) -> None:
        """Implement protocols.PreStepHook: call the user's function before an update."""
        if self.user_functions is not None:
            schedule = partial(lr_at, options=self.options.optimizer)
            self.user_functions.before_step(
                rollout_id, step_id, model=self.chunks, optimizer=self.optimizer, scheduler=schedule
            )  # fmt: skip

    @in_kernels
    def optim_step(self) -> Metrics:
        """Update the weights. Skips an update whose gradient is zero or not finite (see the metric grad_norm).

        In a round without gradient, Adam's momentum would still move the weights in the direction of earlier rounds.
        """
        self.memory.wake()
        lr = lr_at(self.step, self.options.optimizer)
        clip = self.options.optimizer.clip_grad
        result = unless_out_of_memory(partial(optimizer.step, self.chunks, self.optimizer, lr=lr, clip=clip))
        if result is None:
            raise optimizer_error()
        norm, updated = result
        self._forget_calls()
        self.step += 1
        self.updates += updated
        return {"grad_norm": norm, "lr": lr}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the full float32 masters with adapters merged, in checkpoint order."""
        if self.adapters is not None:
            yield from stacked(self.adapters.merged(self.state, self.names), self.shapes)
        else:
            yield from stacked(self.state.tensors(self.names, PARAM), self.shapes)

    def adapter(self) -> Adapter:
        """Return only the adapter. Its tensors are gathered as they are read."""
        assert self.adapters is not None, "a policy without train.lora_rank has no adapter"
        options, base = self.adapters.options, self.base_dir.resolve()
        layers, tensors = self.adapters.layers(self.names), self.adapters.tensors(self.state, self.names)
        return Adapter(base, fingerprint, options.rank, options.alpha, tuple(layers), tensors)

    def consume_adapter(self, consumer: Callable[[Adapter], Any]) -> Any:
        return consumer(self.adapter())

    def save(self, path: Path) -> None:
        """Write model, optimizer and trainer.json in the options' `save_format`, with config and tokenizer.

        "hf" writes float32 weights, and the optimizer into the folder of the trainer's state. Adapters are merged into
        the weights, and also written to the folder `adapter` (peft's format). "torch_dist" writes the weights that the
        model computes with. Master weights and moments are in the optimizer's state, written by the ranks that hold
        them.
        """
        if self.megatron.save_format != "torch_dist":
            return super().save(path)
        with self.memory.awake():
            checkpoint.save_torch_dist(
                path, self.chunks, self.optimizer, companions=self.model_dir, carried=self.carried,
                trainer_state=self._trainer_state(),
            )  # fmt: skip
        return None

    def _trainer_state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "updates": self.updates,
            "seed": self.options.seed,
            "optimizer": asdict(self.options.optimizer),
            "has_moments": self.options.saves_moments,
            **self.fitter.saved(),
        }

    def _streams(self) -> SaveStreams:
        """Return float32 weights, moments and adapters, with the counts of now."""
        shapes, trainer_state = checkpoint.shapes_of(self.updated), self._trainer_state()

        def finish(path: Path) -> None:
            copy_companions(self.model_dir, path, torch.float32, self.carried)
            write_trainer(path, **trainer_state)

        streams = SaveStreams(finish)
        streams.add(chain(self.weights(), self.carried if dist.get_rank() == 0 else ()), self.checkpoint.write)
        if self.options.saves_moments:
            sizes = stacked_shapes(checkpoint.moment_shapes(self.updated))
            moments = stacked(self.state.each(self.updated, MOMENTS), sizes)
            streams.add(moments, lambda path, t: write_float32(new_trainer_folder(path) / OPTIMIZER, sizes, t))
        if self.adapters is not None:
            options, base = self.adapters.options, self.base_dir
            learned = self.state.tensors(shapes, PARAM)
            streams.add(learned, lambda path, t: write_adapter(path / FOLDER, options, base, shapes, t))
        return streams

    def load(self, path: Path) -> None:
        """Load a checkpoint of either format. A model without optimizer gets only the weights."""
        self.memory.wake()
        saved = read_trainer(path)
        self.fitter.restore(saved)
        self._forget_calls()
        if self.adapters is not None:
            self._read_adapter(path / FOLDER, self.adapters.options)
        elif self.updated and is_torch_dist(path):
            self.step, self.updates = checkpoint.load_torch_dist(
                path, self.chunks, self.optimizer, self.options.optimizer
            )
            return
        else:
            self._read_weights(path)
        self.step, self.updates = int(saved["step"]), int(saved.get("updates", saved["step"]))
        if reads_moments(path, saved, self.options):
            checkpoint.load_moments(path, self.state, self.updated, updates=self.updates)
        else:
            self.reset_optimizer()
        optimizer.resume(self.optimizer, updates=self.updates)
        optimizer.drop_gradients(self.chunks, self.optimizer)

    def _forget_calls(self) -> None:
        """Begin a step without gradients."""
        self._calls.clear()
        self.fitter.left_out.clear()

    def _drop_gradients(self) -> None:
        optimizer.drop_gradients(self.chunks, self.optimizer)
        self._forget_calls()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return optimizer.inners(self.optimizer)

    def reset_optimizer(self) -> None:
        """Implement protocols.ResettableOptimizer: set all moments and the count of updates to zero."""
        self.memory.wake()
        for inner in optimizer.inners(self.optimizer):
            for slots in inner.state.values():
                for value in filter(torch.is_tensor, slots.values()):
                    value.zero_()
        self.updates = 0
        optimizer.resume(self.optimizer, updates=0)

    def _read_adapter(self, path: Path, options: LoraOptions) -> None:
        """Load the trained adapter, and its base model if that differs from the current one."""
        base = base_of(path, options, parameter_names=checkpoint.shapes_of(self.updated))
        if base != self.base_dir.resolve():
            self._read_weights(base)
            self.base_dir = base
        checkpoint.load_adapter(path, self.state, self.updated)

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Implement protocols.Sleeper: move weights (unless they are kept), gradients and moments to the host."""
        inners = optimizer.inners(self.optimizer)
        moments = [tensor for inner in inners for slots in inner.state.values() for tensor in slots.values()]
        masters = [main for inner in inners for group in inner.param_groups for main in group["params"]]
        local = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        gradients = [parameter.main_grad for parameter in local if hasattr(parameter, "main_grad")]
        weights = [] if keep_weights else [*local, *masters]
        self.memory.sleep(filter(torch.is_tensor, [*moments, *weights]), scratch=gradients)

    def close(self) -> None:
        """Do nothing: resources end with the process, and other models of the layout use its groups."""


def _with_gradient(module: torch.nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
    """Forward hook that makes the embedding's output require a gradient.

    mcore (0.16.1) recomputes a layer with gradients only if its input requires one, and a frozen embedding gives none.
    Delete when its checkpoint also checks the parameters.
    """
    return embedded if embedded.requires_grad or not torch.is_grad_enabled() else embedded.requires_grad_()
