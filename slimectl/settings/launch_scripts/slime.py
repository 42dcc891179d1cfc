"""slime's launch scripts: flags beyond the table, and settings that several flags decide together."""

from __future__ import annotations

from slimectl.settings.launch_scripts.conversion import Conversion, Dialect, canonical, typed
from slimectl.settings.launch_scripts.flags import Flag
from slimectl.settings.launch_scripts.slime_flags import GENERATE, GROUPS, SFT


def unlisted(conversion: Conversion, flag: Flag) -> None:
    """Hand `--sglang-NAME` to SGLang; list any other flag."""
    name = canonical(flag.name)
    if not name.startswith("sglang_"):
        reason = (
            f"is no flag that this table knows; a function of yours reads custom.{name}, Megatron-core megatron.args"
        )
        conversion.omit(flag, reason)
    elif flag.problem:
        key = f"sglang.args.{name.removeprefix('sglang_')}"
        conversion.omit(flag, f"{flag.problem}; set {key} by hand", by_hand=True)
    else:
        conversion.put(f"sglang.args.{name.removeprefix('sglang_')}", typed(flag), name)


def settle(conversion: Conversion) -> None:
    """Join what slime decides by several flags together."""
    values = conversion.values
    conversion.put("engine.backend", "sglang", "slime's engine is SGLang")
    values.setdefault("engine.dtype", "bfloat16")
    conversion.sources.setdefault("engine.dtype", "the default of slime for its engine")
    _settle_algorithm(conversion)
    _settle_placement(conversion)
    _settle_functions(conversion)
    if conversion.switch("use_wandb") and conversion.switch("use_tensorboard"):
        conversion.put("track.with", ["stdout", "wandb", "tensorboard"], "use_wandb", "use_tensorboard")
    if "save" in conversion.flags and isinstance(values.get("run.dir"), str):
        folder, _, name = str(values["run.dir"]).rstrip("/").rpartition("/")
        conversion.put("run.dir", folder or ".", "save")
        conversion.put("run.name", name, "save")
    parts = [conversion.text(name) for name in ("tb_project_name", "tb_experiment_name")]
    if key := next((key for key in values if key.startswith("track.kwargs.tensorboard")), None):
        conversion.put(
            key, "/".join(["tensorboard_log", *filter(None, parts)]), "tb_project_name", "tb_experiment_name"
        )
    if values.get("train.use_rollout_routing_replay"):
        conversion.take_back("megatron.use_routing_replay", "--use-rollout-routing-replay goes before it")
    if values.get("score.custom_rm_path"):
        conversion.take_back("score.rm_type", "--custom-rm-path goes before it")
    if "launcher" in conversion.flags and "async" in conversion.text("launcher"):
        values.setdefault("run.async_level", 1)
        conversion.sources.setdefault("run.async_level", str(conversion.flags["launcher"]))


def _settle_algorithm(conversion: Conversion) -> None:
    values = conversion.values
    if conversion.text("loss_type") != "sft_loss" and (name := conversion.converted("advantage_estimator")):
        conversion.put("algorithm.name", name, "advantage_estimator")
    if conversion.switch("use_kl_loss") and "kl_loss_coef" not in conversion.flags:
        values.pop("algorithm.kl_loss_coef", None)
        conversion.omit(conversion.flags["use_kl_loss"], "its coefficient is 0; --kl-loss-coef is not given")
    elif not conversion.switch("use_kl_loss"):
        conversion.take_back("algorithm.kl_loss_coef", "has no effect there without --use-kl-loss")
    elif "kl_loss_coef" in conversion.flags:
        conversion.put("algorithm.kl_loss_coef", conversion.text("kl_loss_coef"), "use_kl_loss", "kl_loss_coef")
    if conversion.switch("use_opd") and "opd_kl_coef" in conversion.flags:
        conversion.put("algorithm.opd_kl_coef", conversion.text("opd_kl_coef"), "use_opd", "opd_kl_coef")
    elif values.get("algorithm.name") != "opd" and not conversion.switch("use_opd"):
        conversion.take_back("algorithm.opd_kl_coef", "has no effect there without --use-opd")
    reference = str(values.get("algorithm.ref_load", "")).rstrip("/").rpartition("/")[2]
    if reference.removesuffix("_torch_dist") == str(values.get("model.path")).rstrip("/").rpartition("/")[2]:
        conversion.take_back("algorithm.ref_load", "the reference is the model that the run starts from without it")


def _settle_placement(conversion: Conversion) -> None:
    values = conversion.values
    nodes = conversion.number("actor_num_nodes", 1)
    gpus = nodes * conversion.number("actor_num_gpus_per_node", 8)
    if conversion.switch("colocate"):
        conversion.take_back("cluster.rollout_num_gpus", "with --colocate engines have the trainer's GPUs")
        if not conversion.is_unknown("actor_num_nodes", "actor_num_gpus_per_node"):
            conversion.put("cluster.rollout_num_gpus", gpus, "colocate")
        if values.get("sync.transport") == "distributed":
            conversion.put("sync.transport", "tensor", "colocate", "update_weight_transport")
    if nodes > 1:
        conversion.put("cluster.executor", "ray", "actor_num_nodes")
    if conversion.text("update_weight_mode") == "delta":
        conversion.put("sync.transport", "delta", "update_weight_mode", "update_weight_transport")
    address = conversion.text("sglang_router_ip")
    if address:
        port = conversion.text("sglang_router_port", "30000")
        conversion.put("engine.url", [f"http://{address}:{port}"], "sglang_router_ip", "sglang_router_port")
    elif "sglang_router_port" in conversion.flags:
        conversion.take_back("engine.url", "the router that slimectl starts takes a free port")
    if values.get("engine.url"):
        for key in ("cluster.rollout_num_gpus", "cluster.colocate"):
            conversion.take_back(key, "the servers of engine.url run already")


def _settle_functions(conversion: Conversion) -> None:
    """Replace slime's own functions by what slimectl has in their place."""
    function = conversion.text("rollout_function_path").replace(":", ".")
    if function in (GENERATE, SFT) or function.startswith("slime.rollout."):
        conversion.take_back("rollout.function_path", "is slime's own; slimectl samples rounds itself")
        if function == SFT:
            conversion.put("algorithm.name", "sft", "rollout_function_path")
    elif "fully_async" in function:
        conversion.take_back("rollout.function_path", "run.async_level keeps rounds under way")
        conversion.put("run.async_level", 2, "rollout_function_path")
    if conversion.text("data_source_path").startswith("slime."):
        conversion.take_back("rollout.data_source_path", "is slime's own; slimectl reads rollout.data itself")
    if "check_reward_nonzero_std" in conversion.text("dynamic_sampling_filter_path"):
        conversion.put(
            "rollout.dynamic_sampling_filter_path",
            "slimectl.stages.filters:nonzero_std",
            "dynamic_sampling_filter_path",
        )


SLIME = Dialect("slime", "slime", GROUPS, settle, unlisted, common=("Megatron's arguments", "Megatron's model shape"))
