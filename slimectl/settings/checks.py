"""Conflicts between sections of the settings. Each is one line with both keys and the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from slimectl.plugins.registry import ENGINES
from slimectl.settings.cluster import nodes_of
from slimectl.settings.effects import ineffective
from slimectl.settings.evaluate import EvalSettings
from slimectl.settings.rollout import RolloutSettings
from slimectl.settings.root import Settings
from slimectl.settings.run import KEY_VARIABLES, RunSettings
from slimectl.settings.train import megatron_conflicts, offload_conflicts, optimizer_conflicts, save_conflicts

OF_ATTEMPTS = ("env", "agent", "custom_generate_function_path", "function_path")
"""Settings that each define what an attempt is. At most one may be set."""
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
"""Hooks that are not called for supervised and pairwise losses."""


def conflicts(settings: Settings) -> Iterator[str]:
    """Yield each conflict between sections as one line with both keys and the remedy."""
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
            f"about a round of {settings.rollouts_per_round} rollouts. Set only one."
        )
    if run.num_rollout and run.num_epoch:
        yield "run.num_rollout and run.num_epoch cannot be combined. Set only one."
    yield from _best_conflicts(run, settings.eval)
    if run.profile and run.num_rollout and run.profile[0] > run.num_rollout:
        yield (
            f"run.profile: round {run.profile[0]} is never reached, because run.num_rollout is {run.num_rollout}. Use "
            f"an earlier round, or raise run.num_rollout."
        )
    if rollout.min_new_tokens > rollout.max_response_len:
        yield (
            f"rollout.min_new_tokens: {rollout.min_new_tokens} is above rollout.max_response_len: "
            f"{rollout.max_response_len}. Lower the first or raise the second."
        )
    if len(rewards := [key for key in ("custom_rm_path", "rm", "rm_type") if getattr(settings.score, key)]) > 1:
        yield f"score.{' and score.'.join(rewards)} cannot be combined. Set only one, and the other to none."
    for name, dataset in settings.eval.datasets.items():
        if dataset.rm_type and dataset.custom_rm_path:
            yield f"eval.data.{name}: rm_type and custom_rm_path cannot be combined. Set only one."
    for name in rollout.penalties if rollout.partial_rollout else ():
        yield (
            f"rollout.partial_rollout and rollout.{name} cannot be combined: in a resumed response, penalties would "
            f"ignore the tokens from before the interruption. Drop one."
        )
    yield from _greedy_repeats(settings.eval, rollout)
    if train.lr_warmup_iters and train.lr_warmup_fraction:
        yield "train.lr_warmup_iters and train.lr_warmup_fraction cannot be combined. Set only one."
    if train.deterministic and settings.megatron.args.get("deterministic_mode") is False:
        yield "train.deterministic: true contradicts megatron.args.deterministic_mode = false. Drop one."
    if train.deterministic and train.backend not in ("fsdp", "megatron"):
        yield f"train.deterministic: {train.backend} has no deterministic mode. Set it to false."
    if train.min_lr > train.lr:
        yield f"train.min_lr: {train.min_lr:g} is above train.lr: {train.lr:g}. Swap them."
    ages = run.async_level or rollout.partial_rollout or rollout.over_sampling_batch_size
    if run.max_staleness is not None and not ages and run.max_staleness > 0:
        yield (
            "run.max_staleness has no effect with run.async_level = 0. Raise run.async_level, or drop "
            "run.max_staleness."
        )
    yield from _buffer_contradictions(run, rollout)
    yield from _order_contradictions(rollout)
    if train.balance_by_flops and not (train.use_dynamic_batch_size and train.balance_data):
        lacking = "balance_data" if train.use_dynamic_batch_size else "use_dynamic_batch_size"
        yield f"train.balance_by_flops needs train.{lacking} = true. Set it, or drop train.balance_by_flops."
    if train.freeze_params_name_list and train.only_train_params_name_list:
        yield "train.freeze_params_name_list and train.only_train_params_name_list cannot be combined. Set only one."
    accounts = [name for name in settings.track.with_ if name in KEY_VARIABLES]
    if settings.track.api_key is not None and len(accounts) > 1:
        yield (
            f"track.api_key: {' and '.join(accounts)} have different accounts. Set "
            f"{' and '.join(f'track.kwargs.{name}.api_key' for name in accounts)} instead."
        )
    if settings.track.mode == "shared" and "wandb" not in settings.track.with_:
        yield "track.mode: shared works only with wandb. Add wandb to track.with, or set another mode."
    yield from _waits_beyond_stall(settings)
    yield from _algorithm_contradictions(settings)
    yield from _placement_contradictions(settings)
    yield from optimizer_conflicts(train)
    yield from save_conflicts(train, settings.megatron, in_background=settings.run.async_save)
    yield from offload_conflicts(train, settings.megatron)
    yield from megatron_conflicts(settings.megatron, train.backend, settings.cluster.ranks)
    yield from _save_format_contradictions(settings)
    yield from _adapter_contradictions(settings)
    yield from _routing_contradictions(settings)
    yield from _hook_conflicts(settings)
    yield from _shadowed_settings(settings)
    yield from algorithm.conflicts(temperature=rollout.temperature)
    yield from (line for _, _, line in ineffective(settings))


def _waits_beyond_stall(settings: Settings) -> Iterator[str]:
    """Yield limits on single calls that were raised above the time after which a run counts as stalled."""
    timeout_s, fields = settings.run.stall_timeout, type(settings.rollout).model_fields
    limits = {"score.wall_timeout_s": (settings.score.wall_timeout_s or 0.0, 0.0)}
    for name in ("agent_timeout_s", "env_timeout_s", "tool_timeout_s"):
        limits[f"rollout.{name}"] = getattr(settings.rollout, name), fields[name].default
    for name, (limit_s, default_s) in limits.items():
        if timeout_s is not None and limit_s > max(timeout_s, default_s):
            yield (
                f"{name} = {limit_s:g} is more than run.stall_timeout = {timeout_s:g}, which would end the run while "
                f"it waits. Raise run.stall_timeout above it, or set it to none."
            )


def _best_conflicts(run: RunSettings, evaluation: EvalSettings) -> Iterator[str]:
    """Yield conflicts between settings that compare evaluations and the configured evaluations."""
    if run.save_best is None:
        if run.early_stop_patience:
            yield (
                "run.early_stop_patience needs run.save_best, the metric that must improve. Set it, or drop "
                "run.early_stop_patience."
            )
        return
    if not evaluation.datasets:
        yield "run.save_best compares evaluations, but eval.data has no dataset. Add eval.data.NAME = PROMPTS."
    elif not evaluation.interval:
        yield (
            "run.save_best compares evaluations, but eval.interval is not set. Set it to the rounds between "
            "evaluations."
        )


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
    """Yield keys of [custom] that are also keys of slimectl, whose value hooks would not get."""
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
            yield f"custom.{key}: hooks read {name} as args.{key}. Set {name}, or rename yours."


def _routing_contradictions(settings: Settings) -> Iterator[str]:
    """Yield conflicts of replaying the engine's routing with offline algorithms and with other routing to replay."""
    if not settings.train.use_rollout_routing_replay:
        return
    if settings.algorithm.trains_on != "rollouts" or settings.algorithm.trained_output == "values":
        yield (
            f"train.use_rollout_routing_replay: {settings.algorithm.name} does not train on sampled responses. Set it "
            f"to false."
        )
    if settings.engine.router not in ("auto", "none"):
        yield (
            f"train.use_rollout_routing_replay and engine.router: {settings.engine.router} cannot be combined: "
            "sglang-router 0.3.2 does not forward requests for experts. Drop engine.router."
        )
    if settings.train.backend == "megatron" and settings.megatron.use_routing_replay:
        yield (
            "train.use_rollout_routing_replay and megatron.use_routing_replay cannot be combined: one replays the "
            "engine's routing, the other the trainer's own. Drop one."
        )


def _save_format_contradictions(settings: Settings) -> Iterator[str]:
    """Yield conflicts of torch_dist, which stores only language-model weights, with adapters and value heads."""
    critic = settings.algorithm.critic_options
    if settings.megatron.save_format == "hf" or settings.train.backend != "megatron":
        return
    if settings.train.lora_rank is not None:
        yield (
            "megatron.save_format: torch_dist cannot store adapters. Set hf with train.lora_rank, and convert the "
            "result."
        )
    if settings.algorithm.trained_output == "values" or (critic is not None and critic.shared):
        yield (
            f"megatron.save_format: torch_dist cannot store the value head that {settings.algorithm.name} trains in "
            "the same model. Set hf."
        )


def _adapter_contradictions(settings: Settings) -> Iterator[str]:
    """Yield conflicts of adapter-only pushes with transports of whole checkpoints, and with engine.load."""
    if settings.train.lora_rank is None or settings.sync.lora != "adapter":
        return
    if settings.sync.transport in ("disk", "delta"):
        yield (
            f"sync.lora: adapter, but sync.transport = {settings.sync.transport} writes whole checkpoints. Set "
            f"sync.transport to auto, or sync.lora to merged."
        )
    if settings.engine.load is not None:
        yield "sync.lora: adapter, but the weights of engine.load are not the base model's. Set sync.lora to merged."


def _greedy_repeats(evaluation: EvalSettings, rollout: RolloutSettings) -> Iterator[str]:
    """Yield datasets that would repeat the same greedy response. With an agent, tool results may make them differ."""
    for name, dataset in evaluation.datasets.items():
        temperature = evaluation.temperature if dataset.temperature is None else dataset.temperature
        n = dataset.n_samples_per_prompt or evaluation.n_samples_per_prompt
        agent = dataset.custom_generate_function_path or any(getattr(rollout, key) for key in OF_ATTEMPTS[:3])
        if temperature == 0 and n > 1 and not agent:
            yield (
                f"eval.data.{name}: at temperature 0, all {n} responses to a prompt are the same. Set "
                f"n_samples_per_prompt = 1, or a temperature above 0."
            )


def _buffer_contradictions(run: RunSettings, rollout: RolloutSettings) -> Iterator[str]:
    """Yield conflicts between over-sampling, partial rollouts and asynchronous rounds."""
    over, size = rollout.over_sampling_batch_size, run.rollout_batch_size
    if over is not None and over < size:
        yield (
            f"rollout.over_sampling_batch_size: {over} is below run.rollout_batch_size: {size}. Raise it, or "
            f"drop it to turn over-sampling off."
        )
    if rollout.partial_rollout and run.async_level:
        yield (
            f"rollout.partial_rollout and run.async_level: {run.async_level} cannot be combined: asynchronous "
            f"responses already continue across rounds. Drop one."
        )
    if over is not None and over > size and run.async_level > 1:
        yield (
            f"rollout.over_sampling_batch_size and run.async_level: {run.async_level} cannot be combined: later "
            f"rounds are already in progress. Drop one."
        )


def _algorithm_contradictions(settings: Settings) -> Iterator[str]:
    """Yield conflicts between the algorithm and what it trains on."""
    algorithm = settings.algorithm
    if getattr(algorithm, "gdpo_weights", None) == {} and not settings.score.rm:
        yield (
            "algorithm.gdpo_weights: missing, and algorithm.name gdpo compares the components of a reward. Set it to "
            "{NAME = weight} with the keys of your reward object, or score.rm to a sum."
        )
    if settings.train.ppo_epochs > 1 and algorithm.trains_on != "rollouts":
        yield (
            f"train.ppo_epochs: {algorithm.name} does not train on rounds of rollouts. Set run.num_epoch for several "
            f"passes over a file."
        )


def _order_contradictions(rollout: RolloutSettings) -> Iterator[str]:
    """Yield conflicts between settings that decide which prompt comes next."""
    orders = {
        "rollout.data_weights": rollout.data_weights,
        "rollout.domain_weights": rollout.domain_weights,
        "rollout.easy_threshold, hard_threshold or retire_after": rollout.uses_pools,
        "rollout.data_source_path": rollout.data_source_path,
    }
    names = [name for name, value in orders.items() if value]
    if len(names) > 1:
        yield f"{names[0]} and {names[1]} cannot be combined: both decide which prompt comes next. Drop one."
    if rollout.uses_pools and rollout.function_path:
        yield (
            "rollout.function_path and rollout.easy_threshold, hard_threshold or retire_after cannot be combined: "
            "pools need the loop over prompts. Drop one."
        )
    low, high = rollout.hard_threshold, rollout.easy_threshold
    if low is not None and high is not None and low >= high:
        yield f"rollout.hard_threshold: {low:g} is not below rollout.easy_threshold: {high:g}. Swap them."
    if rollout.uses_pools and rollout.easy_fraction + rollout.hard_fraction > 1:
        yield (
            f"rollout.easy_fraction: {rollout.easy_fraction:g} and rollout.hard_fraction: {rollout.hard_fraction:g} "
            f"are more than 1 together. Lower one."
        )


def _placement_contradictions(settings: Settings) -> Iterator[str]:
    """Yield conflicts between engines, weight transports and the cluster."""
    engine, sync, cluster = settings.engine, settings.sync, settings.cluster
    if cluster.actor_num_nodes > 1 and cluster.executor == "local":
        yield f'cluster.actor_num_nodes: {cluster.actor_num_nodes} machines need cluster.executor = "ray"'
    gpus_per_engine = cluster.rollout_num_gpus_per_engine
    if cluster.rollout_num_gpus and cluster.rollout_num_gpus % gpus_per_engine:
        nearest = max(gpus_per_engine, cluster.rollout_num_gpus // gpus_per_engine * gpus_per_engine)
        yield (
            f"cluster.rollout_num_gpus: {cluster.rollout_num_gpus} is not a multiple of "
            f"cluster.rollout_num_gpus_per_engine: {gpus_per_engine}. Use {nearest}."
        )
    if ENGINES.fact(engine.backend, "in_process", False) and gpus_per_engine > 1:
        yield (
            f"cluster.rollout_num_gpus_per_engine: {gpus_per_engine}, but an {engine.backend} engine uses one "
            f'device. Set engine.backend = "sglang" or "vllm", or use 1.'
        )
    yield from _engines_over_machines(settings)
    if engine.url and settings.num_engines > 1:
        yield "engine.url and engine.num_engines cannot be combined: those servers are already running. Set only one."
    if settings.uses_servers and sync.transport == "in_process":
        yield "sync.transport: in_process cannot reach servers. Use tensor, distributed, disk or delta."
    if not settings.uses_servers and sync.transport not in ("auto", "in_process"):
        yield (
            f"sync.transport: {sync.transport} is for servers, but the only engine is embedded in this process. "
            f"Set engine.num_engines or engine.backend, or drop sync.transport."
        )
    if cluster.colocate and settings.run.async_level:
        yield (
            f"cluster.colocate and run.async_level: {settings.run.async_level} cannot be combined: engines and "
            f"trainer take turns on the shared GPUs. Drop one."
        )
    if cluster.colocate and sync.transport == "delta":
        yield "cluster.colocate and sync.transport: delta cannot be combined. Use tensor on shared GPUs."
    if settings.sglang.server_groups and (settings.sglang.prefill_num_servers or engine.num_engines > 1):
        yield (
            "sglang.server_groups cannot be combined with sglang.prefill_num_servers or engine.num_engines: it lists "
            "every engine itself"
        )
    yield from _disaggregation_contradictions(settings)
    if engine.router not in ("auto", "none") and not ENGINES.fact(engine.backend, "takes_router", True):
        yield (
            f"engine.router: {engine.router}: sglang-router does not forward to {engine.backend}. Set "
            f"engine.router = none."
        )
    if settings.rollout.min_p and settings.sglang.args.get("enable_deterministic_inference"):
        yield (
            "rollout.min_p and sglang.args.enable_deterministic_inference cannot be combined: SGLang 0.5.21 "
            "supports seeded sampling only without min-p. Drop one."
        )
    if cluster.executor != "local" and "-" in settings.rollout.data:
        yield "rollout.data: - is stdin, which Ray actors cannot read. Write the prompts to a file."


def _engines_over_machines(settings: Settings) -> Iterator[str]:
    """Yield conflicts between engines that span several machines and other settings."""
    engine, cluster = settings.engine, settings.cluster
    gpus = max(settings.engine_gpus, default=1)
    machines = nodes_of(gpus, cluster.num_gpus_per_node)
    if machines == 1 or not settings.uses_servers or engine.url:
        return
    size = (
        f"cluster.rollout_num_gpus_per_engine: {gpus} needs {machines} machines of cluster.num_gpus_per_node: "
        f"{cluster.num_gpus_per_node}"
    )
    if not ENGINES.fact(engine.backend, "spans_machines", False):
        yield f'{size}, but an engine of {engine.backend} runs on one. Set engine.backend = "sglang", or lower it.'
    if cluster.executor == "local" and engine.device != "cpu":
        yield f'{size}. Set cluster.executor = "ray", or engine.device = "cpu" for processes on this one.'
    if settings.sync.transport == "tensor":
        yield f"{size}, but sync.transport: tensor reaches only the trainer's. Use distributed, disk or delta."


def _disaggregation_contradictions(settings: Settings) -> Iterator[str]:
    """Yield conflicts between prefill/decode disaggregation and other settings."""
    prefills = any(group.get("role") == "prefill" for group in settings.sglang.server_groups)
    if not (settings.sglang.prefill_num_servers or prefills):
        return
    if settings.engine.router == "none":
        yield ("engine.router: none, but prefill/decode disaggregation needs sglang-router. Drop engine.router.")
    if settings.train.use_rollout_routing_replay:
        yield (
            "train.use_rollout_routing_replay and sglang.prefill_num_servers cannot be combined: SGLang 0.5.21 does "
            "not pass the prompt's experts from prefill to decode. Drop one."
        )


def _hook_conflicts(settings: Settings) -> Iterator[str]:
    """Yield each conflict between a hook and another setting as one line with both keys and the remedy."""
    algorithm, rollout, train = settings.algorithm, settings.rollout, settings.train
    run = settings.run
    for one, *others in (OF_ATTEMPTS, OF_ATTEMPTS[1:]):
        for key in others:
            if getattr(rollout, one) and getattr(rollout, key):
                yield f"rollout.{one} and rollout.{key} cannot be combined: both define the attempt. Drop one."
    for key in OF_ROUNDS:
        if rollout.function_path and getattr(rollout, key):
            yield (
                f"rollout.function_path and rollout.{key} cannot be combined: the function already fills rounds. Drop "
                "one."
            )
    for key in ("function_path", "data_source_path"):
        if getattr(rollout, key) and run.async_level > 1:
            yield (
                f"rollout.{key} and run.async_level: {run.async_level} cannot be combined: no later round "
                f"may be in progress. Set run.async_level to 0 or 1."
            )
    teacher = settings.algorithm.teacher_options
    if train.custom_loss_function_path and teacher is not None and teacher.divergence != "token":
        yield (
            f"train.custom_loss_function_path and algorithm.opd_divergence = {teacher.divergence} cannot be combined: "
            f"your own loss replaces it. Set opd_divergence to token, which changes advantages, or drop your loss."
        )
    if teacher is not None and teacher.in_trainer and settings.megatron.pipeline_model_parallel_size > 1:
        yield (
            f"megatron.pipeline_model_parallel_size: {settings.megatron.pipeline_model_parallel_size} stages cannot "
            f"compare distributions over the full vocabulary. Set algorithm.opd_top_k, or use one stage."
        )
    if train.custom_loss_function_path:
        for key in ("custom_tis_function_path", "custom_pg_loss_reducer_function_path"):
            if getattr(train, key):
                yield (
                    f"train.custom_loss_function_path and train.{key} cannot be combined: your own loss replaces it. "
                    "Drop one."
                )
    if algorithm.trains_on != "rollouts":
        sections = {"rollout": rollout, "score": settings.score, "train": train}
        for name in OF_POLICY_GRADIENTS:
            section, _, key = name.partition(".")
            if getattr(sections[section], key):
                yield f"{name} has no effect with algorithm.name {algorithm.name}, which has its own loss. Drop it."
