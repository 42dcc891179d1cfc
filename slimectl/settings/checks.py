"""Conflicts between sections of the settings, each as a line that names both keys and the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from slimectl.registry import ENGINES
from slimectl.settings.cluster import nodes_of
from slimectl.settings.effects import ineffective
from slimectl.settings.evaluate import EvalSettings
from slimectl.settings.rollout import RolloutSettings
from slimectl.settings.root import Settings
from slimectl.settings.run import KEY_VARIABLES, RunSettings
from slimectl.settings.train import megatron_conflicts, offload_conflicts

OF_ATTEMPTS = ("env", "agent", "custom_generate_function_path", "function_path")
"""Settings of which each says what an attempt is."""
OF_ROUNDS = ("dynamic_sampling_filter_path", "buffer_filter_path", "over_sampling_batch_size", "partial_rollout")
"""Keys of [rollout] that control how a round is filled, which rollout.function_path replaces."""

OF_POLICY_GRADIENTS = (
    "train.custom_advantage_function_path",
    "train.custom_loss_function_path",
    "train.custom_tis_function_path",
    "train.custom_pg_loss_reducer_function_path",
    "train.custom_convert_samples_to_train_data_path",
    "score.custom_reward_post_process_path",
    "rollout.data_postprocess_path",
)
"""Hooks that supervised and pairwise losses never call."""


def conflicts(settings: Settings) -> Iterator[str]:
    """Conflicts between sections, each as a line that names both keys and the remedy."""
    run, train, rollout, algorithm = settings.run, settings.train, settings.rollout, settings.algorithm
    steps = train.num_steps_per_rollout
    if steps and settings.rollouts_per_round % steps:
        yield (
            f"train.num_steps_per_rollout: {steps} does not divide the {settings.rollouts_per_round} rollouts of a "
            f"round (run.rollout_batch_size x rollout.n_samples_per_prompt). Change one of the three."
        )
    elif steps and train.global_batch_size and train.global_batch_size * steps != settings.rollouts_per_round:
        yield (
            f"train.global_batch_size: {train.global_batch_size} and train.num_steps_per_rollout: {steps} disagree "
            f"about a round of {settings.rollouts_per_round} rollouts. Give one of them."
        )
    if run.num_rollout and run.num_epoch:
        yield "run.num_rollout and run.num_epoch cannot be combined. Set only one."
    yield from _best_conflicts(run, settings.eval)
    if run.profile and run.num_rollout and run.profile[0] > run.num_rollout:
        yield (
            f"run.profile: round {run.profile[0]} is never reached, as run.num_rollout is {run.num_rollout}. Name an "
            f"earlier round, or raise the latter."
        )
    if rollout.min_new_tokens > rollout.max_response_len:
        yield (
            f"rollout.min_new_tokens: {rollout.min_new_tokens} is above rollout.max_response_len: "
            f"{rollout.max_response_len}. Lower it or raise the latter."
        )
    if len(rewards := [key for key in ("custom_rm_path", "rm", "rm_type") if getattr(settings.score, key)]) > 1:
        yield f"score.{' and score.'.join(rewards)} cannot be combined. Set only one, and the other to none."
    for name, dataset in settings.eval.datasets.items():
        if dataset.rm_type and dataset.custom_rm_path:
            yield f"eval.data.{name}: rm_type and custom_rm_path cannot be combined. Set only one."
    for name in rollout.penalties if rollout.partial_rollout else ():
        yield (
            f"rollout.partial_rollout and rollout.{name} cannot be combined: in a resumed response, penalties would "
            f"not count the tokens from before the interruption. Drop one."
        )
    yield from _greedy_repeats(settings.eval, rollout)
    if train.lr_warmup_iters and train.lr_warmup_fraction:
        yield "train.lr_warmup_iters and train.lr_warmup_fraction cannot be combined. Set only one."
    if train.deterministic and settings.megatron.args.get("deterministic_mode") is False:
        yield "train.deterministic: true contradicts megatron.args.deterministic_mode = false. Drop one."
    if train.deterministic and train.backend not in ("fsdp", "megatron"):
        yield f"train.deterministic: {train.backend} has no such switch. Set it to false."
    if train.min_lr > train.lr:
        yield f"train.min_lr: {train.min_lr:g} is above train.lr: {train.lr:g}. Swap them."
    ages = run.async_level or rollout.partial_rollout or rollout.over_sampling_batch_size
    if run.max_staleness is not None and not ages and run.max_staleness > 0:
        yield "run.max_staleness has no effect with run.async_level = 0. Raise run.async_level or drop it."
    yield from _buffer_contradictions(run, rollout)
    if train.balance_by_flops and not (train.use_dynamic_batch_size and train.balance_data):
        lacking = "balance_data" if train.use_dynamic_batch_size else "use_dynamic_batch_size"
        yield f"train.balance_by_flops needs train.{lacking} = true. Set it or drop train.balance_by_flops."
    if train.freeze_params_name_list and train.only_train_params_name_list:
        yield "train.freeze_params_name_list and train.only_train_params_name_list cannot be combined. Set only one."
    accounts = [name for name in settings.track.with_ if name in KEY_VARIABLES]
    if settings.track.api_key is not None and len(accounts) > 1:
        yield (
            f"track.api_key: {' and '.join(accounts)} are different accounts. Give "
            f"{' and '.join(f'track.kwargs.{name}.api_key' for name in accounts)} in its place."
        )
    if settings.track.mode == "shared" and "wandb" not in settings.track.with_:
        yield "track.mode: shared is a mode of wandb alone. Add wandb to track.with, or set another mode."
    yield from _placement_contradictions(settings)
    yield from offload_conflicts(train, settings.megatron)
    yield from megatron_conflicts(settings.megatron, train.backend, settings.cluster.ranks)
    yield from _save_format_contradictions(settings)
    yield from _adapter_contradictions(settings)
    yield from _routing_contradictions(settings)
    yield from _hook_conflicts(settings)
    yield from _shadowed_settings(settings)
    yield from algorithm.conflicts(temperature=rollout.temperature)
    yield from (line for _, _, line in ineffective(settings))


def _best_conflicts(run: RunSettings, evaluation: EvalSettings) -> Iterator[str]:
    """Conflicts of what compares evaluations with the evaluations that there are."""
    if run.save_best is None:
        if run.early_stop_patience:
            yield "run.early_stop_patience needs run.save_best, the metric that is to improve. Set it, or drop both."
        return
    if not evaluation.datasets:
        yield "run.save_best compares evaluations, and eval.data has no dataset. Add eval.data.NAME = PROMPTS."
    elif not evaluation.interval:
        yield "run.save_best compares evaluations, and eval.interval is not set. Set the rounds between evaluations."


def off_policy_penalties(settings: Settings) -> str | None:
    """Return a warning if responses come from a penalized distribution and nothing corrects for it."""
    penalties, algorithm = settings.rollout.penalties, settings.algorithm
    if not penalties or algorithm.trains_on != "rollouts":
        return None
    named = " and ".join(f"rollout.{name} = {value:g}" for name, value in penalties.items())
    message = f"{named}: responses come from the penalized distribution, but the policy is trained without penalties."
    if settings.engine.backend == "vllm":
        return f"{message} vLLM reports log-probabilities without penalties, so algorithm.use_tis cannot correct it."
    if any(getattr(algorithm, key, False) for key in ("use_tis", "use_rollout_logprobs")):
        return None
    if settings.train.custom_tis_function_path or settings.train.custom_loss_function_path:
        return None
    return f"{message} Set algorithm.use_tis = true to correct for it."


def _shadowed_settings(settings: Settings) -> Iterator[str]:
    """Keys of [custom] under which hooks would read another value than the program has."""
    sections = {name: getattr(settings, name) for name in type(settings).model_fields if name != "custom"}
    for key in settings.custom.entries():
        names = [f"{name}.{key}" for name, section in sections.items() if key in type(section).model_fields]
        names += [
            f"{name}.{key.removeprefix(f'{name}_')}"
            for name, section in sections.items()
            if key.startswith(f"{name}_") and key.removeprefix(f"{name}_") in type(section).model_fields
        ]
        if key in sections or names:
            name = names[0] if names else f"[{key}]"
            yield f"custom.{key}: hooks read {name} as args.{key}. Set that, or give yours another name."


def _routing_contradictions(settings: Settings) -> Iterator[str]:
    """Conflicts of the engine's routing with algorithms that sample nothing, and with another routing to replay."""
    if not settings.train.use_rollout_routing_replay:
        return
    if settings.algorithm.trains_on != "rollouts" or settings.algorithm.trained_output == "values":
        yield (
            f"train.use_rollout_routing_replay: {settings.algorithm.name} trains on no answers of an engine. Set it to "
            f"false."
        )
    if settings.train.backend == "megatron" and settings.megatron.use_routing_replay:
        yield (
            "train.use_rollout_routing_replay and megatron.use_routing_replay cannot be combined: one replays the "
            "engine's routing, the other the trainer's own. Drop one."
        )


def _save_format_contradictions(settings: Settings) -> Iterator[str]:
    """Conflicts of torch_dist, which holds the weights of a language model alone, with what else is trained."""
    critic = settings.algorithm.critic_options
    if settings.megatron.save_format == "hf" or settings.train.backend != "megatron":
        return
    if settings.train.lora_rank is not None:
        yield "megatron.save_format: torch_dist has no adapters. Set hf with train.lora_rank, and convert that."
    if settings.algorithm.trained_output == "values" or (critic is not None and critic.shared):
        yield (
            f"megatron.save_format: torch_dist has no value head, which {settings.algorithm.name} trains in the same "
            f"model. Set hf."
        )


def _adapter_contradictions(settings: Settings) -> Iterator[str]:
    """Conflicts of pushes of adapters alone with transports of whole checkpoints, and with weights of other files."""
    if settings.train.lora_rank is None or settings.sync.lora != "adapter":
        return
    if settings.sync.transport in ("disk", "delta"):
        yield (
            f"sync.lora: adapter, but sync.transport = {settings.sync.transport} writes whole checkpoints. Set "
            f"sync.transport to auto, or sync.lora to merged."
        )
    if settings.engine.load is not None:
        yield "sync.lora: adapter, but engine.load has other weights than the base model. Set sync.lora to merged."


def _greedy_repeats(evaluation: EvalSettings, rollout: RolloutSettings) -> Iterator[str]:
    """Datasets that would draw the same greedy answer several times; an agent's may differ by its tools' results."""
    for name, dataset in evaluation.datasets.items():
        temperature = evaluation.temperature if dataset.temperature is None else dataset.temperature
        n = dataset.n_samples_per_prompt or evaluation.n_samples_per_prompt
        agent = dataset.custom_generate_function_path or any(getattr(rollout, key) for key in OF_ATTEMPTS[:3])
        if temperature == 0 and n > 1 and not agent:
            yield (
                f"eval.data.{name}: temperature 0 gives all {n} answers to a prompt alike. Set n_samples_per_prompt = "
                f"1, or a temperature above 0."
            )


def _buffer_contradictions(run: RunSettings, rollout: RolloutSettings) -> Iterator[str]:
    """Conflicts between over-sampling, partial rollouts and asynchronous rounds."""
    over, size = rollout.over_sampling_batch_size, run.rollout_batch_size
    if over is not None and over < size:
        yield (
            f"rollout.over_sampling_batch_size: {over} is below run.rollout_batch_size: {size}. Raise it, or drop it "
            f"for no over-sampling."
        )
    if rollout.partial_rollout and run.async_level:
        yield (
            f"rollout.partial_rollout and run.async_level: {run.async_level} cannot be combined: answers worked ahead "
            f"go on by themselves. Drop one."
        )
    if over is not None and over > size and run.async_level > 1:
        yield (
            f"rollout.over_sampling_batch_size and run.async_level: {run.async_level} cannot be combined: further "
            f"rounds are under way already. Drop one."
        )


def _placement_contradictions(settings: Settings) -> Iterator[str]:
    """Conflicts between engines, weight transports and the cluster."""
    engine, sync, cluster = settings.engine, settings.sync, settings.cluster
    if cluster.actor_num_nodes > 1 and cluster.executor == "local":
        yield f'cluster.actor_num_nodes: {cluster.actor_num_nodes} machines need cluster.executor = "ray"'
    gpus_per_engine = cluster.rollout_num_gpus_per_engine
    if cluster.rollout_num_gpus and cluster.rollout_num_gpus % gpus_per_engine:
        nearest = max(gpus_per_engine, cluster.rollout_num_gpus // gpus_per_engine * gpus_per_engine)
        yield (
            f"cluster.rollout_num_gpus: {cluster.rollout_num_gpus} is no multiple of "
            f"cluster.rollout_num_gpus_per_engine: {gpus_per_engine}. Give {nearest}."
        )
    if ENGINES.fact(engine.backend, "in_process", False) and gpus_per_engine > 1:
        yield (
            f"cluster.rollout_num_gpus_per_engine: {gpus_per_engine}, but an {engine.backend} engine lives on one "
            f'device. Set engine.backend = "sglang" or "vllm", or give 1.'
        )
    yield from _engines_over_machines(settings)
    if engine.url and settings.num_engines > 1:
        yield "engine.url and engine.num_engines cannot be combined: those servers run already. Give one of them."
    if settings.uses_servers and sync.transport == "in_process":
        yield "sync.transport: in_process reaches no server. Give tensor, distributed, disk or delta."
    if not settings.uses_servers and sync.transport not in ("auto", "in_process"):
        yield (
            f"sync.transport: {sync.transport} reaches servers, and one embedded engine lives in this process. "
            f"Set engine.num_engines or engine.backend, or drop it."
        )
    if cluster.colocate and settings.run.async_level:
        yield (
            f"cluster.colocate and run.async_level: {settings.run.async_level} cannot be combined: the GPUs are shared "
            f"in turns"
        )
    if cluster.colocate and sync.transport == "delta":
        yield "cluster.colocate and sync.transport: delta cannot be combined. Use tensor on shared GPUs."
    if settings.sglang.server_groups and (settings.sglang.prefill_num_servers or engine.num_engines > 1):
        yield (
            "sglang.server_groups excludes sglang.prefill_num_servers and engine.num_engines: it names every engine "
            "itself"
        )
    yield from _disaggregation_contradictions(settings)
    if engine.router not in ("auto", "none") and not ENGINES.fact(engine.backend, "takes_router", True):
        yield (
            f"engine.router: {engine.router}: sglang-router does not forward to {engine.backend}. Set engine.router = "
            f"none."
        )
    if settings.rollout.min_p and settings.sglang.args.get("enable_deterministic_inference"):
        yield (
            "rollout.min_p and sglang.args.enable_deterministic_inference cannot be combined: SGLang 0.5.21 draws by "
            "seed without min-p only. Drop one."
        )
    if cluster.executor != "local" and "-" in settings.rollout.data:
        yield "rollout.data: - is stdin, which no actor can read. Write the prompts to a file."


def _engines_over_machines(settings: Settings) -> Iterator[str]:
    """Conflicts of engines that span several machines with other settings."""
    engine, cluster = settings.engine, settings.cluster
    gpus = max(settings.engine_gpus, default=1)
    machines = nodes_of(gpus, cluster.num_gpus_per_node)
    if machines == 1 or not settings.uses_servers or engine.url:
        return
    size = (
        f"cluster.rollout_num_gpus_per_engine: {gpus} takes {machines} machines of cluster.num_gpus_per_node: "
        f"{cluster.num_gpus_per_node}"
    )
    if not ENGINES.fact(engine.backend, "spans_machines", False):
        yield f'{size}, and an engine of {engine.backend} lives on one. Set engine.backend = "sglang", or lower it.'
    if cluster.executor == "local" and engine.device != "cpu":
        yield f'{size}. Set cluster.executor = "ray", or engine.device = "cpu" for processes of this one.'
    if settings.sync.transport == "tensor":
        yield f"{size}, and sync.transport: tensor reaches the trainer's own. Give distributed, disk or delta."


def _disaggregation_contradictions(settings: Settings) -> Iterator[str]:
    """Conflicts of prefill/decode disaggregation with other settings."""
    prefills = any(group.get("role") == "prefill" for group in settings.sglang.server_groups)
    if not (settings.sglang.prefill_num_servers or prefills):
        return
    if settings.engine.router == "none":
        yield (
            "engine.router: none, but sglang-router pairs the servers that prefill with those that decode. Leave it out."
        )
    if settings.train.use_rollout_routing_replay:
        yield (
            "train.use_rollout_routing_replay and sglang.prefill_num_servers cannot be combined: SGLang 0.5.21 hands "
            "no experts of the prompt from prefill to decode. Drop one."
        )


def _hook_conflicts(settings: Settings) -> Iterator[str]:
    """Conflicts of a hook with another setting, each as a line that names both keys and the remedy."""
    algorithm, rollout, train = settings.algorithm, settings.rollout, settings.train
    run = settings.run
    for one, *others in (OF_ATTEMPTS, OF_ATTEMPTS[1:]):
        for key in others:
            if getattr(rollout, one) and getattr(rollout, key):
                yield f"rollout.{one} and rollout.{key} cannot be combined: both are the attempt. Drop one."
    for key in OF_ROUNDS:
        if rollout.function_path and getattr(rollout, key):
            yield f"rollout.function_path and rollout.{key} cannot be combined: the function fills rounds. Drop one."
    for key in ("function_path", "data_source_path"):
        if getattr(rollout, key) and run.async_level > 1:
            yield (
                f"rollout.{key} and run.async_level: {run.async_level} cannot be combined: no group of a "
                f"further round can be under way. Set run.async_level to 0 or 1."
            )
    if train.custom_loss_function_path:
        for key in ("custom_tis_function_path", "custom_pg_loss_reducer_function_path"):
            if getattr(train, key):
                yield f"train.custom_loss_function_path and train.{key} cannot be combined: the loss is yours. Drop one."
    if algorithm.trains_on != "rollouts":
        sections = {"rollout": rollout, "score": settings.score, "train": train}
        for name in OF_POLICY_GRADIENTS:
            section, _, key = name.partition(".")
            if getattr(sections[section], key):
                yield f"{name} has no effect with algorithm.name {algorithm.name}, whose loss is its own. Drop it."
