"""Trains a Hugging Face model in one process or as one rank of many: forward and backward, updates, checkpoints."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from slimectl.architectures.family import TOWER_PATTERN
from slimectl.architectures.lora import halves
from slimectl.checkpoints.base_model import fingerprint
from slimectl.checkpoints.module_tensors import ModuleTensors, Slot
from slimectl.checkpoints.torch_dist.metadata import is_torch_dist
from slimectl.data.images import processor_of
from slimectl.errors import CheckpointError, SettingsError
from slimectl.policies.checkpoint import (
    OPTIMIZER,
    CarriedWeights,
    copy_companions,
    new_trainer_folder,
    read_tensors,
    read_trainer,
    write_float32,
    write_trainer,
)
from slimectl.policies.determinism import in_kernels
from slimectl.policies.fsdp.build import empty_model, set_recompute
from slimectl.policies.fsdp.lora import Adapters
from slimectl.policies.fsdp.master_weights import MasterWeights, clip, local_part, squared_norm
from slimectl.policies.fsdp.model import Outputs, Request, Role, TrainedModel, rope_limit
from slimectl.policies.fsdp.optimizer import optimizer_of
from slimectl.policies.fsdp.padded_model import padded_options, report_general_path
from slimectl.policies.fsdp.routing_replay import ExpertReplay
from slimectl.policies.fsdp.vision import tower_parameters
from slimectl.policies.host_memory import HostMemory
from slimectl.policies.lm_head import TeacherStates, check_same_vocabulary
from slimectl.policies.lora import FOLDER, LoraOptions, base_of, read_adapter, write_adapter
from slimectl.policies.metrics import merge_metrics, read_metrics
from slimectl.policies.moments import moments_of
from slimectl.policies.muon import hidden_matrices, moment_names
from slimectl.policies.onednn_linear import ROWS, is_faster, use_onednn
from slimectl.policies.optimizer import lr_at, trainable_names
from slimectl.policies.options import TrainerOptions
from slimectl.policies.out_of_memory import MeasuresPacks, PackFitter, optimizer_error, unless_out_of_memory
from slimectl.policies.pack_plan import PackPlan, Value, plan_packs
from slimectl.policies.recompute import Recompute
from slimectl.policies.saving import SaveStreams, StreamSaver, reads_moments
from slimectl.protocols import Adapter, CheckpointFormat, NamedTensors
from slimectl.system.liveness import note_progress
from slimectl.system.model_files import trainer_folder
from slimectl.types import Loss, Metrics, TrainingSample

LAYER_PARAMETERS = 2
"""Number of parameters that hold the experts of a layer. A stream of single experts alternates between them."""


class FsdpTrainer(StreamSaver, MeasuresPacks):
    """Base class of policies and critics: everything except the computation on the hidden states.

    In a process group, every rank builds a trainer and makes the same calls. With `options.trains` False, no gradient
    memory is allocated.
    """

    role: ClassVar[Role]

    def __init__(
        self, model_dir: Path, checkpoint: CheckpointFormat, options: TrainerOptions = TrainerOptions()
    ) -> None:
        self.model_dir, self.checkpoint, self.options = Path(model_dir), checkpoint, options
        self.device, self.step = torch.device(options.device or "cpu"), 0
        grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        mesh = self._mesh(grouped or options.offload == "parameters")
        self.model = empty_model(self.model_dir, options.recompute)
        self.model.role, self.model.temperature = self.role, options.temperature
        hf: Any = self.model.hf
        self.teacher: FsdpTrainer | None = None
        planning = options
        if self.model.obstacle:
            planning = padded_options(options)
            report_general_path(hf.config.model_type, self.model.obstacle)
        self.rope_limit = rope_limit(hf)
        self.vocabulary = int(hf.get_input_embeddings().num_embeddings)
        self.replay = _replay(self.model, options)
        added = self._add_modules(hf)
        self.adapters, self.base_dir = None, self.model_dir
        if options.lora is not None:
            self.adapters = Adapters(hf, options.lora, seed=options.seed)
            added |= self.adapters.initial
        self.row_multiple = 1
        if is_faster(self.device, options.compute_dtype) and not self.model.obstacle:
            use_onednn(hf)
            self.row_multiple = 1 if self.replay is not None else ROWS  # every token needs experts to replay
        present_names, names = [name for name, _ in hf.named_parameters()], set()
        if options.lora is None:
            names = trainable_names(present_names, freeze=options.freeze, train_only=options.train_only)
        if options.freeze_vision_tower:
            names = {name for name in names if not re.search(TOWER_PATTERN, name)}
        trained = ((names - tower_parameters(hf)) | set(added)) - self._unused_names(hf)
        for name, parameter in hf.named_parameters():
            parameter.requires_grad_(options.trains and name in trained)
        tensors = ModuleTensors(hf, stored=checkpoint.open(self.model_dir).forms(), optional=list(added))
        self.masters = MasterWeights(self.model, options, device=self.device, mesh=mesh, names=tensors, added=added)
        if self.adapters is not None:
            self.adapters.initial.clear()  # they would stay in host memory
        self.memory = HostMemory()
        self.masters.read(checkpoint, self.model_dir)
        self.carried_names = self.masters.names.carried
        self.matrices = hidden_matrices(hf) & self.masters.trained.keys() if options.optimizer.name == "muon" else set()
        """Names of the parameters that Muon updates."""
        # In a sharded model, other ranks wait for this one within a pack.
        self.fitter = PackFitter(
            planning, retries=mesh is None, recompute=partial(set_recompute, hf, Recompute("full"))
        )
        self._calls: list[tuple[Sequence[TrainingSample], Loss]] = []
        """Calls whose gradients have been added up since the last update."""
        self.optimizer = optimizer_of(self.masters, options.optimizer, self.matrices, dtype=options.compute_dtype)

    def _mesh(self, sharded: bool) -> Any | None:
        """Return the mesh of all ranks to shard over, possibly a single rank, or None if the model is not sharded."""
        if sharded and not dist.is_initialized():
            backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return dist.init_device_mesh(self.device.type, (self.ranks,)) if sharded else None

    @property
    def weight_version(self) -> str:
        return str(self.step)

    def set_teacher(self, teacher: FsdpTrainer) -> None:
        """Compare distributions over the full vocabulary with those of a frozen policy on the same ranks.

        Raises SettingsError for a teacher with another vocabulary.
        """
        check_same_vocabulary(teacher.head_rows, self.head_rows)
        self.teacher = teacher

    @property
    def head_rows(self) -> int:
        """Number of tokens that the model predicts."""
        return int(self.model.hf.get_output_embeddings().weight.shape[0])

    def states(self, plan: PackPlan) -> TeacherStates:
        """Return the final states of a pack, and the head, without gradients. It is valid until the next forward."""
        self.memory.wake()
        with torch.no_grad():
            hidden_UH = self._forward(plan, Request(states=True)).values_R
        # A forward without gradients leaves the root with its head gathered.
        weight_VH, causal = self.model.hf.get_output_embeddings().weight.detach(), self.model.causal
        return TeacherStates(hidden_UH, weight_VH, self.options.temperature, None if causal.is_plain else causal.logits)

    def _add_modules(self, hf: nn.Module) -> dict[str, Tensor]:
        """Add the modules of a subclass to the model, and return their full initial tensors by parameter name."""
        return {}

    def _unused_names(self, hf: nn.Module) -> set[str]:
        """Return the names of the parameters that a subclass does not use."""
        return set()

    def of_rows(self, rows: Sequence[TrainingSample], *, predicted: bool = False) -> list[list[float]]:
        """Return the values, or predicted values, of every response token, without gradients, on every rank."""

        def of_pack(plan: PackPlan) -> dict[int, list[float]]:
            outputs = self._forward(plan, Request())
            values_R = outputs.predicted_R if predicted else outputs.values_R
            assert values_R is not None
            return plan.by_row(values_R)

        return self.by_row(rows, of_pack)

    @in_kernels
    def by_row(
        self, rows: Sequence[TrainingSample], of_pack: Callable[[PackPlan], dict[int, list[Value]]]
    ) -> list[list[Value]]:
        """Return what `of_pack` returns of every row by its index, without gradients, on every rank."""
        self.memory.wake()
        outputs_by_row: dict[int, list[Value]] | None = None
        with torch.no_grad():
            while outputs_by_row is None:
                outputs_by_row = self._by_row(rows, of_pack)
        for part in self._gather_ranks(outputs_by_row):
            outputs_by_row |= part
        return [outputs_by_row[i] for i in range(len(rows))]

    def _by_row(
        self, rows: Sequence[TrainingSample], of_pack: Callable[[PackPlan], dict[int, list[Value]]]
    ) -> dict[int, list[Value]] | None:
        """Return the outputs of this rank's rows, or None if a pack did not fit and the next ones are smaller."""
        outputs_by_row: dict[int, list[Value]] = {}
        for plan in self._plans(rows, for_loss=False):
            if (outputs := self.fitter.compute(partial(of_pack, plan), plan, trains=False)) is None:
                return None
            outputs_by_row |= outputs
        return outputs_by_row

    @in_kernels
    def forward_backward(self, rows: Sequence[TrainingSample], loss: Loss) -> Metrics:
        """Implement protocols.Policy.forward_backward. Packs that do not fit into memory are divided.

        Loss and gradient are then, bit for bit, as if the packs had been that small from the beginning of the step: a
        backward pass that ran out of memory may have added a part of its gradient, so all packs are computed again.
        """
        self.memory.wake()
        self._calls.append((rows, loss))
        sums = self._sum_packs(rows, loss)
        while sums is None:
            self.masters.drop_gradients()
            for call in self._calls:
                if (sums := self._sum_packs(*call)) is None:
                    break
        return merge_metrics(self._gather_ranks(read_metrics(sums)))

    def _sum_packs(self, rows: Sequence[TrainingSample], loss: Loss) -> dict[str, Tensor] | None:
        """Add the gradients of this rank's packs to those of the step, and return the sums of their metrics.

        Returns None if a pack did not fit and the next ones are smaller. Part of its gradient may have been added.
        """
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        sums = {"loss": zero}
        fitting = self.fitter.kept(rows)
        for plan in self._plans(fitting, for_loss=True):
            if (pack_sums := self.fitter.compute(partial(self._backward, plan, loss), plan, trains=True)) is None:
                return None
            sums = merge_metrics([sums, pack_sums])
        return sums if len(fitting) == len(rows) else sums | {"samples_left_out": zero + len(rows) - len(fitting)}

    def _backward(self, plan: PackPlan, loss: Loss) -> dict[str, Tensor]:
        """Add the gradient of one pack, and return its loss and metrics."""
        divergence = getattr(loss, "divergence", None)
        request = Request(
            entropy=loss.needs_entropy,
            logits=getattr(loss, "needs_logits", False),
            divergence=divergence,
            teacher=None if divergence is None or self.teacher is None else self.teacher.states(plan),
        )
        outputs = self._forward(plan, request)
        if plan.rows:
            value, metrics = loss(plan.token_batch(*outputs[:5]))
        else:
            value, metrics = outputs.values_R.sum(), {}
            if outputs.predicted_R is not None:  # ranks reduce the gradients of the same parameters
                value = value + outputs.predicted_R.sum()
        value.backward()
        self.masters.accumulate()
        return {name: part.detach().double() for name, part in {**metrics, "loss": value}.items()}

    @in_kernels
    def optim_step(self) -> Metrics:
        """Update the weights. Skips an update whose gradient is zero or not finite (see the metric grad_norm).

        In a round without gradient, Adam's momentum would still move the weights in the direction of earlier rounds.
        """
        self.memory.wake()
        gradients = self.masters.gradients()
        squares = squared_norm(gradients).to(self.device)
        if self.ranks > 1:
            dist.all_reduce(squares)
        norm, lr = squares.sqrt().item(), lr_at(self.step, self.options.optimizer)
        if 0 < norm < float("inf"):
            clip(gradients, norm, self.options.optimizer.clip_grad)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            if unless_out_of_memory(self._update) is None:
                raise optimizer_error()
        self._drop_gradients()
        self.step += 1
        return {"grad_norm": norm, "lr": lr}

    def _update(self) -> bool:
        self.optimizer.step()
        self.masters.copy_to_model()
        return True

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the float32 masters with adapters merged, in checkpoint order."""
        fused = lru_cache(maxsize=LAYER_PARAMETERS)(self._full_tensor)
        for name, place in self.masters.in_checkpoint:
            if isinstance(place, Slot):
                gather = self._full_tensor if place.index is ... else fused
                yield name, self._merged(place.parameter, gather(place.parameter)[place.index].float())
                continue
            fulls = {each: self._merged(each, self._full_tensor(each).float()) for each in place.parameters}
            yield from self.masters.names.to_published(place, fulls)

    def _merged(self, parameter: str, full: Tensor) -> Tensor:
        """Merge the adapter of a parameter, if it has one."""
        if self.adapters is None or not (pair := self.adapters.pair(parameter)):
            return full
        return self.adapters.options.merged(full, *map(self._full_tensor, pair))

    def consume_weights(self, consumer: Callable[[NamedTensors], Any]) -> Any:
        return consumer(self.weights())

    def adapter(self) -> Adapter:
        """Return only the adapter. Its tensors are gathered as they are read."""
        assert self.adapters is not None, "a policy without train.lora_rank has no adapter"
        options, base = self.adapters.options, self.base_dir.resolve()
        tensors = self._adapter_tensors(self._adapter_parameters)
        return Adapter(base, fingerprint, options.rank, options.alpha, tuple(self._adapter_parameters), tensors)

    @cached_property
    def _adapter_parameters(self) -> dict[str, list[tuple[str, str]]]:
        """Map checkpoint names of adapted layers to (checkpoint name, parameter name) of A and of B."""
        assert self.adapters is not None
        layers = {}
        for name, place in self.masters.in_checkpoint:
            for parameter in (place.parameter,) if isinstance(place, Slot) else place.parameters:
                if parameters := self.adapters.pair(parameter):
                    layer = (name if isinstance(place, Slot) else parameter).removesuffix(".weight")
                    layers[layer] = list(zip(halves(layer), parameters, strict=True))
        return layers

    def _adapter_tensors(self, layers: Mapping[str, list[tuple[str, str]]]) -> Iterator[tuple[str, Tensor]]:
        for parameters in layers.values():
            for name, parameter in parameters:
                yield name, self._full_tensor(parameter)

    def consume_adapter(self, consumer: Callable[[Adapter], Any]) -> Any:
        return consumer(self.adapter())

    def _streams(self) -> SaveStreams:
        """Return float32 weights, moments and adapters, with the counts of now."""
        state = {
            "step": self.step,
            "updates": self._update_count(),
            "seed": self.options.seed,
            "optimizer": dataclasses.asdict(self.options.optimizer),
            "has_moments": self.options.saves_moments,
            **self.fitter.saved(),
        }
        carried: CarriedWeights | None = None
        weights: Iterator[tuple[str, Tensor]] = self.weights()
        if self.rank == 0:
            carried = CarriedWeights(self.checkpoint.open(self.model_dir), self.carried_names)
            weights = chain(weights, carried)

        def finish(path: Path) -> None:
            _, first = next(iter(self.checkpoint.read(path)))
            copy_companions(self.model_dir, path, first.dtype, carried)
            write_trainer(path, **state)

        streams = SaveStreams(finish)
        streams.add(weights, self.checkpoint.write)
        if self.options.saves_moments:
            shapes = self._moment_shapes()
            streams.add(self._moments(), lambda path, t: write_float32(new_trainer_folder(path) / OPTIMIZER, shapes, t))
        if self.adapters is not None:
            options, base = self.adapters.options, self.base_dir
            streams.add(
                self._trained_tensors(),
                lambda path, t: write_adapter(path / FOLDER, options, base, self._shapes(), t),
            )
        return streams

    def load(self, path: Path) -> None:
        self.memory.wake()
        state = read_trainer(path)
        if is_torch_dist(path):
            raise CheckpointError(
                f'{path}: saved as torch_dist, which only train.backend = "megatron" can resume. Start from its'
                f" weights instead: --model {path}"
            )
        if self.adapters is None:
            self.masters.read(self.checkpoint, path)
        else:
            self._read_adapter(path / FOLDER, self.adapters.options)
        if reads_moments(path, state, self.options):
            self._read_moments(trainer_folder(path) / OPTIMIZER, float(state.get("updates", state["step"])))
        else:
            self.reset_optimizer()
        self.step = int(state["step"])
        self.fitter.restore(state)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        self.masters.drop_gradients()
        self._calls.clear()
        self.fitter.left_out.clear()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def _read_moments(self, file: Path, updates: float) -> None:
        """Load the moments. The tensors of a parameter follow each other in the file."""
        slots = self.masters.names.slots
        tensors = ((*name.partition(".")[::2], full) for name, full in read_tensors(file, self._moment_shapes()))
        for parameter, parts in groupby(tensors, key=lambda part: slots[part[1]].parameter):
            master = self.masters.trained[parameter]
            state, moments = self.optimizer.state[master], moments_of(self.optimizer, master)
            loaded: dict[str, Tensor] = {}
            for moment, tensor, full in parts:
                self.masters.assign(full, loaded.setdefault(moment, torch.zeros_like(master)), slots[tensor])
            for moment, local in loaded.items():
                moments.allocate(state, moment, master)
                moments.write(state, moment, 0, local.view(-1))
            state["step"] = torch.tensor(updates, dtype=torch.float32, device=master.device)

    def reset_optimizer(self) -> None:
        """Implement protocols.ResettableOptimizer: set all moments and the count of updates to zero."""
        self.memory.wake()
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Implement protocols.Sleeper: move weights (unless they are kept), gradients and moments to the host."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass without gradients leaves the root gathered
        weights = [*self.masters.tensors.values(), *map(local_part, self.masters.parameters.values())]
        moments = [tensor for slots in self.optimizer.state.values() for tensor in slots.values()]
        self.memory.sleep([*moments, *(() if keep_weights else weights)], scratch=self.masters.gradient_sums)
        if self.teacher is not None:
            self.teacher.sleep(keep_weights=keep_weights)

    def close(self) -> None:
        """Do nothing: all resources end with the process."""

    def _read_adapter(self, path: Path, options: LoraOptions) -> None:
        """Load the trained adapter, and its base model if that differs from the current one."""
        base = base_of(path, options, parameter_names=self._shapes())
        if base != self.base_dir.resolve():
            self.masters.read(self.checkpoint, base)
            self.base_dir = base
        for name, full in read_adapter(path, self._shapes()):
            self.masters.assign(full, self.masters.tensors[name])
        self.masters.copy_to_model()

    def _full_tensor(self, parameter: str) -> Tensor:
        return self._gather(parameter, self.masters.tensors[parameter])

    def _gather(self, name: str, local: Tensor) -> Tensor:
        """Return the full tensor of `local`, which is sharded like parameter `name`. Collective over all ranks."""
        note_progress()
        local = (self.memory.value(local) if self.memory.asleep else local).to(self.device)
        if self.masters.mesh is None or name in self.masters.buffers:
            return local
        from torch.distributed.tensor import DTensor

        sharded: Any = self.masters.parameters[name]
        shape, stride = sharded.size(), sharded.stride()
        return DTensor.from_local(
            local, self.masters.mesh, sharded.placements, shape=shape, stride=stride
        ).full_tensor()

    def _trained_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.masters.trained:
            yield name, self._full_tensor(name)

    def _shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the trained tensors by their checkpoint names."""
        pieces = (self.masters.names.pieces(name) for name in self.masters.trained)
        return {name: torch.Size(shape) for shapes in pieces for name, shape in shapes.items()}

    def _plans(self, rows: Sequence[TrainingSample], *, for_loss: bool) -> Iterator[PackPlan]:
        """Plan the packs of this rank, padded for its products."""
        plans = plan_packs(
            rows, self.fitter.planning, rank=self.rank, ranks=self.ranks, vocabulary=self.vocabulary,
            routing=None if self.replay is None else self.replay.shape, for_loss=for_loss,
        )  # fmt: skip
        return (plan.padded(self.row_multiple) for plan in plans)

    def _forward(self, plan: PackPlan, request: Request) -> Outputs:
        batch = self.model.batch(
            plan,
            dtype=self.options.compute_dtype,
            device=self.device,
            processor=partial(processor_of, str(self.model_dir)),
        )
        if self.rope_limit is not None:
            self.rope_limit.check(plan)
        if self.replay is not None:
            self.replay.set(batch)
        outputs: Outputs = self.model(batch, request)
        if self.replay is not None:
            self.replay.check_use()
        self.model.check(batch)
        return outputs

    def _gather_ranks(self, part: dict[Any, Any]) -> list[dict[Any, Any]]:
        if self.ranks == 1:
            return [part]
        parts: list[dict[Any, Any]] = [{} for _ in range(self.ranks)]
        dist.all_gather_object(parts, part)
        return parts

    def _update_count(self) -> int:
        """Return the number of optimizer updates, without skipped steps."""
        slots = [self.optimizer.state[master] for master in self.masters.trained.values()]
        return int(self.memory.value(slots[0]["step"])) if slots and slots[0] else 0

    def _moment_shapes(self) -> dict[str, torch.Size]:
        """Return names and shapes of the tensors in OPTIMIZER, in order."""
        slots = self.masters.names.slots
        return {
            f"{moment}.{name}": shape
            for name, shape in self._shapes().items()
            for moment in moment_names(slots[name].parameter, self.matrices)
        }

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        def gathered(parameter: str) -> list[Tensor]:
            master = self.masters.trained[parameter]
            slots, moments = self.optimizer.state[master], moments_of(self.optimizer, master)
            state = {name: self.memory.value(tensor) for name, tensor in slots.items()}
            names = moment_names(parameter, self.matrices)
            local = [moments.read(state, m).view_as(master) if m in state else torch.zeros_like(master) for m in names]
            return [self._gather(parameter, moment) for moment in local]

        fused = lru_cache(maxsize=LAYER_PARAMETERS)(gathered)
        for name in self._shapes():
            slot = self.masters.names.slots[name]
            gather = gathered if slot.index is ... else fused
            for moment, full in zip(moment_names(slot.parameter, self.matrices), gather(slot.parameter), strict=True):
                yield f"{moment}.{name}", full[slot.index]


def _replay(model: TrainedModel, options: TrainerOptions) -> ExpertReplay | None:
    """Return what replays routing. Raises SettingsError if the model cannot."""
    if not options.rollout_routing_replay:
        return None
    if model.obstacle:
        raise SettingsError(
            f"train.use_rollout_routing_replay: {model.hf.config.model_type} takes the general path of fsdp"
            f" ({model.obstacle}), which does not replay experts. Set it to false."
        )
    return ExpertReplay(model.hf)


def check_training(model_dir: Path, options: TrainerOptions) -> TrainedModel:
    """Check the options of a trainer against the model of config.json, and return that without weights.

    Raises CheckpointError for a model that cannot be trained or an adapter that does not fit, and SettingsError for
    modules, layers or parameters that the model does not have.
    """
    model = empty_model(model_dir, options.recompute)
    hf = model.hf
    _replay(model, options)
    if options.lora is None:
        names = [name for name, _ in hf.named_parameters()]
        trainable_names(names, freeze=options.freeze, train_only=options.train_only)
    else:
        Adapters(hf, options.lora, seed=0)
    return model
