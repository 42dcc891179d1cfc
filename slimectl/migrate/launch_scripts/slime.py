"""slime's launch scripts: flags beyond the table, and settings that several flags decide together."""

from __future__ import annotations

import json
import re
from typing import Any

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.conversion import Conversion, Dialect, Omission, Row, canonical, stem, take, typed
from slimectl.migrate.launch_scripts.flags import Flag
from slimectl.migrate.launch_scripts.slime_flags import GENERATE, GROUPS, SFT
from slimectl.migrate.launch_scripts.values import SOLUTION
from slimectl.migrate.stand_ins import STAND_INS
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.settings.keys import DEFAULT_ALGORITHM

FSDP_DEFAULTS = {"lr_decay_style": "constant", "weight_decay": 0.0, "adam_beta2": 0.95}
"""Defaults of slime's FSDP trainer that differ from Megatron's. It has no dropout."""
NO_LIMIT = "is not given, so responses end only with the context of the model. Set rollout.max_response_len by hand"
MODEL = ("hf_checkpoint",)
PROMPTS = ("prompt_data", "data_source_path", "rollout_function_path")
"""Flags for the model or the source of prompts. Every training has one of them."""
NORMALIZED = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Algorithms that need normalized advantages here."""
EVALUATIONS = ("eval", "evaluate", "run_eval", "inference", "generate")
"""Names of programs that do not train."""


SCHEME = re.compile(r"(?i)(?:^|[-_.])(fp8|int4|int8|w8a8|w4a16|nvfp4|mxfp4|mxfp8|awq|gptq)(?=$|[-_.])")
"""A quantization in the name of a folder."""
NATIVE = (
    ("fp8", re.compile(r"(?i)deepseek-(?:r1(?!-distill)|v3)|kimi-k2-instruct")),
    ("int4", re.compile(r"(?i)kimi-k2-thinking")),
    ("mxfp4", re.compile(r"(?i)gpt-oss")),
)
"""Models that are published quantized, by their scheme."""
FULL = re.compile(r"(?i)[-_.](bf16|bfloat16|fp16|fp32)(?=$|[-_.])")
MEGATRON = re.compile(r"(?i)(?:torch[-_]?dist|[-_](?:dist|mcore|megatron))$|^iter_\d+$|^release$")
"""Last part of the path of a Megatron checkpoint."""
SUFFIX = re.compile(r"(?i)[-_.]+(?:torch[-_]?dist|dist|mcore|megatron|slime|hf|bf16|fp8|int4|nvfp4|mxfp4|mxfp8)$")
EXPERTS = re.compile(r"(?i)\d+B-A\d+(?:\.\d+)?B")
"""Sizes in the name of a mixture of experts: total and active parameters."""
PUSHED = ("fp8",)
"""Quantizations that weight pushes support."""
CHECKPOINTS = {"algorithm.opd_teacher_load": "opd_teacher_load", "algorithm.critic_load": "critic_load"}


def last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def is_megatron(path: str) -> bool:
    """Whether a path is a Megatron checkpoint, by its last part."""
    return MEGATRON.search(last_part(path)) is not None


def scheme_of(path: str) -> str:
    """Return the quantization of a model's folder, by its name, or an empty string.

    >>> scheme_of("/root/Qwen3-30B-A3B-FP8/"), scheme_of("/root/DeepSeek-R1"), scheme_of("/root/DeepSeek-R1-bf16")
    ('fp8', 'fp8', '')
    """
    name = last_part(path)
    if (match := SCHEME.search(name)) is not None:
        return match[1].lower()
    return "" if FULL.search(name) else next((scheme for scheme, names in NATIVE if names.search(name)), "")


def model_name(path: str) -> str:
    """Return the name of the model in a folder, in any format.

    >>> model_name("/a/Qwen3-4B_torch_dist/") == model_name("/b/Qwen3-4B")
    True
    """
    name, before = last_part(path), ""
    while name != before:
        name, before = SUFFIX.sub("", name), name
    return re.sub(r"[-_.]", "", name).lower()


def has_experts(conversion: Conversion) -> bool:
    """Whether the model is a mixture of experts, by its flags or its name."""
    is_divided = conversion.number("expert_model_parallel_size", 1) > 1
    return is_divided or "num_experts" in conversion.flags or bool(EXPERTS.search(_path(conversion, "hf_checkpoint")))


def settle_weights(conversion: Conversion) -> None:
    """Decide which weights are trained, which the engines load, and which are the reference.

    slime trains the weights of `--load`, or else of `--ref-load`. `--hf-checkpoint` is the tokenizer and what engines
    load first. It may be quantized.
    """
    folder, start = _path(conversion, "hf_checkpoint"), _start(conversion)
    scheme = scheme_of(folder)
    if scheme:
        _settle_engine(conversion, folder, scheme)
    if start and (scheme or model_name(start) != model_name(folder)):
        _settle_model(conversion, folder, start, scheme)
    _settle_reference(conversion, folder, start)
    for key, name in CHECKPOINTS.items():
        if is_megatron(str(conversion.values.get(key, ""))):
            _ask_to_convert(conversion, key, name)


def _path(conversion: Conversion, name: str) -> str:
    """The path of a flag, without its unknown parts."""
    flag = conversion.flags.get(name)
    return flag.values[0].text if flag is not None and flag.values else ""


def _start(conversion: Conversion) -> str:
    """The checkpoint that training starts from. If `--load` equals `--save`, it only resumes an existing run."""
    load, save = _path(conversion, "load").rstrip("/"), _path(conversion, "save").rstrip("/")
    return load if load and load != save else _path(conversion, "ref_load")


def _settle_engine(conversion: Conversion, folder: str, scheme: str) -> None:
    """Give engines the quantized folder, if weights can be pushed in its format."""
    flag = conversion.flags["hf_checkpoint"]
    if scheme not in PUSHED:
        reason = (f"holds {scheme} weights, which cannot be pushed to engines. Leave engine.load out to sample in "
                  "bfloat16, or set it to a folder that `slimectl convert MODEL DIR --quantize fp8` makes")  # fmt: skip
        conversion.omit(flag, reason, by_hand=True)
    elif flag.problem:
        conversion.unlist("hf_checkpoint")
        conversion.omit(flag, f"{flag.problem}. Set engine.load by hand", by_hand=True)
    else:
        conversion.put("engine.load", folder, "hf_checkpoint")


def _settle_model(conversion: Conversion, folder: str, start: str, scheme: str) -> None:
    """Train the checkpoint that slime starts from instead of `--hf-checkpoint`."""
    name = "load" if start == _path(conversion, "load").rstrip("/") else "ref_load"
    flag = conversion.flags[name]
    is_folder = not is_megatron(start) and (
        conversion.text("train_backend") == "fsdp" or conversion.text("megatron_to_hf_mode") == "bridge"
    )
    if is_folder and not flag.problem:
        conversion.put("model.path", start, name)
        return
    conversion.drop("model.path")
    conversion.unlist(name)
    tokenizer = f"only the tokenizer{' and the engine' if scheme else ''} of {last_part(folder)}"
    command = f"`slimectl convert {start} DIR --config {folder}`"
    reason = f"Set model.path to a Hugging Face directory of these weights: {command}"
    conversion.omit(flag, f"is what training starts from, with {tokenizer}. {reason}", by_hand=True)


def _settle_reference(conversion: Conversion, folder: str, start: str) -> None:
    """Set the reference only if it is not the model that the run starts from."""
    reference = _path(conversion, "ref_load")
    has_divergence = conversion.switch("use_kl_loss") and conversion.real("kl_loss_coef", 0.0) > 0
    if model_name(reference) == model_name(start):
        conversion.take_back("algorithm.ref_load", "the reference is the model that the run starts from")
    elif model_name(reference) == model_name(folder) and not scheme_of(folder):
        conversion.put("algorithm.ref_load", folder, "ref_load")
    elif is_megatron(reference) and (has_divergence or conversion.real("kl_coef", 0.0) > 0):
        _ask_to_convert(conversion, "algorithm.ref_load", "ref_load")


def _ask_to_convert(conversion: Conversion, key: str, name: str) -> None:
    """Add a Megatron checkpoint to the settings that the user must set."""
    conversion.drop(key)
    path = _path(conversion, name)
    reason = f"is a checkpoint of Megatron. Set {key} to what `slimectl convert {path} DIR` makes"
    conversion.omit(conversion.flags[name], reason, by_hand=True)


def unlisted(conversion: Conversion, flag: Flag) -> None:
    """Pass `--sglang-NAME` on to SGLang, and list any other flag."""
    name = canonical(flag.name)
    if not name.startswith("sglang_"):
        keys = f"Set custom.{name} if a function of yours reads it, or megatron.args.{name} if megatron-core does"
        conversion.omit(flag, f"is not in the table of slime's flags. {keys}")
    else:
        take(conversion, flag, Row(name, f"sglang.args.{name.removeprefix('sglang_')}", convert=typed))


def settle(conversion: Conversion) -> None:
    """Set what depends on several of slime's flags together."""
    values, program = conversion.values, stem(conversion.text("launcher"))
    if program in EVALUATIONS:
        place = conversion.flags["launcher"].place
        raise SettingsError(f"{place}: {program}.py evaluates a model and trains nothing. Use `slimectl eval`")
    conversion.put("engine.backend", "sglang", "slime's engine is SGLang")
    values.setdefault("engine.dtype", "bfloat16")
    conversion.sources.setdefault("engine.dtype", "the default of slime for its engine")
    _settle_algorithm(conversion)
    _settle_training(conversion)
    _settle_placement(conversion)
    _settle_functions(conversion)
    _settle_distillation(conversion)
    _settle_self_teacher(conversion)
    _settle_teachers(conversion)
    settle_weights(conversion)
    _settle_tracking(conversion)
    if values.get("score.custom_rm_path"):
        conversion.take_back("score.rm_type", "--custom-rm-path takes precedence")
    if values.get("algorithm.name") == "sft":
        _drop_sampling(conversion)
    elif "async" in program:
        values.setdefault("run.async_level", 1)
        conversion.sources.setdefault("run.async_level", str(conversion.flags["launcher"]))
    _ask_for_functions(conversion)


def _drop_sampling(conversion: Conversion) -> None:
    """Drop the settings of engines, because supervised training never samples."""
    for key in [key for key in conversion.values if key.startswith(("engine.", "sglang."))]:
        if conversion.sources[key].startswith("--"):
            conversion.take_back(key, "supervised training never samples")
        else:
            conversion.drop(key)


def _settle_tracking(conversion: Conversion) -> None:
    """Set the name of the run and its trackers."""
    values = conversion.values
    if conversion.switch("use_wandb") and conversion.switch("use_tensorboard"):
        conversion.put("track.with", ["stdout", "wandb", "tensorboard"], "use_wandb", "use_tensorboard")
    if "save" in conversion.flags:
        conversion.name_run("save")
    parts = [conversion.text(name) for name in ("tb_project_name", "tb_experiment_name")]
    if key := next((key for key in values if key.startswith("track.kwargs.tensorboard")), None):
        folder = "/".join(["tensorboard_log", *filter(None, parts)])
        conversion.put(key, folder, "tb_project_name", "tb_experiment_name")


def _settle_algorithm(conversion: Conversion) -> None:
    values = conversion.values
    if conversion.text("loss_type") != "sft_loss" and (name := conversion.converted("advantage_estimator")):
        conversion.put("algorithm.name", name, "advantage_estimator")
    _settle_clip(conversion)
    if values.get("algorithm.name") == "ppo" and "critic_lr" not in conversion.flags:
        rate = conversion.text("lr", "1e-6")
        conversion.put("algorithm.critic_lr", rate, "the default of slime for critic-lr is lr")
    if values.get("algorithm.name") in NORMALIZED and "normalize_advantages" not in conversion.flags:
        conversion.settled.add("algorithm.normalize_advantages")
        reason = f"{values['algorithm.name']} always normalizes advantages here"
        conversion.omissions.append(Omission("the default of slime for normalize-advantages, false", "", reason))
    if conversion.switch("use_kl_loss") and "kl_loss_coef" not in conversion.flags:
        values.pop("algorithm.kl_loss_coef", None)
        conversion.omit(conversion.flags["use_kl_loss"], "its coefficient is 0, as --kl-loss-coef is not given")
    elif not conversion.switch("use_kl_loss"):
        conversion.take_back("algorithm.kl_loss_coef", "has no effect there without --use-kl-loss")
    elif "kl_loss_coef" in conversion.flags:
        conversion.put("algorithm.kl_loss_coef", conversion.text("kl_loss_coef"), "use_kl_loss", "kl_loss_coef")
    if conversion.switch("use_opd") and "opd_kl_coef" in conversion.flags:
        conversion.put("algorithm.opd_kl_coef", conversion.text("opd_kl_coef"), "use_opd", "opd_kl_coef")
    elif values.get("algorithm.name") != "opd" and not conversion.switch("use_opd"):
        conversion.take_back("algorithm.opd_kl_coef", "has no effect there without --use-opd")


def _settle_clip(conversion: Conversion) -> None:
    """Set the upper bound of the ratio to the lower one, as slime does without `--eps-clip-high`.

    Algorithms here have their own bounds.
    """
    name = conversion.values.get("algorithm.name", DEFAULT_ALGORITHM)
    field = ALGORITHMS[name].model_fields.get("eps_clip_high")
    if field is None or field.default is None or "eps_clip_high" in conversion.flags:
        return
    if not conversion.is_unknown("eps_clip"):
        bound = conversion.text("eps_clip", "0.2")
        conversion.put("algorithm.eps_clip_high", bound, "the default of slime for eps-clip-high is eps-clip")


def _settle_training(conversion: Conversion) -> None:
    """Set rounds and sizes, and the trainer's own defaults."""
    _settle_trainer(conversion)
    if conversion.switch("use_lora"):  # adapters have their own learning rate and weight decay
        if rate := next((name for name in ("lora_learning_rate", "lr") if name in conversion.flags), ""):
            conversion.put_known("train.lr", conversion.text(rate), rate)
        conversion.put("train.weight_decay", conversion.text("lora_weight_decay", "0.0"), "lora_weight_decay")
    is_supervised = conversion.text("loss_type") == "sft_loss" or SFT in conversion.text("rollout_function_path")
    if not is_supervised and "rollout_max_response_len" not in conversion.flags:
        conversion.omissions.append(Omission("--rollout-max-response-len", "", NO_LIMIT, by_hand=True))
    for name in ("debug_train_only", "disable_compute_advantages_and_returns") if is_supervised else ():
        if name in conversion.flags:
            conversion.unlist(name)
            conversion.omit(conversion.flags[name], "supervised training never samples")
    for names, key in (MODEL, "model.path"), (PROMPTS, "rollout.data"):
        if not set(names) & conversion.flags.keys():
            flag = f"--{names[0].replace('_', '-')}"
            conversion.omissions.append(Omission(flag, "", f"is not given. Set {key} by hand", by_hand=True))
    if conversion.values.get("train.use_rollout_routing_replay"):
        conversion.take_back("megatron.use_routing_replay", "--use-rollout-routing-replay takes precedence")
    if "num_rollout" in conversion.flags:
        conversion.take_back("run.num_epoch", "--num-rollout takes precedence")
    if conversion.values.get("train.balance_by_flops"):
        conversion.settled.add("train.balance_data")


def _settle_trainer(conversion: Conversion) -> None:
    """Set the defaults of the FSDP trainer or of Megatron, and training in fp8."""
    is_bridge = conversion.text("megatron_to_hf_mode") == "bridge"
    if conversion.text("train_backend") == "fsdp":
        conversion.program_defaults |= FSDP_DEFAULTS | {"attention_dropout": None}
    elif is_bridge:
        conversion.program_defaults["attention_dropout"] = None
    elif "hidden_dropout" not in conversion.flags:
        conversion.put("megatron.args.hidden_dropout", 0.1, "the default of Megatron for hidden-dropout")
    if not conversion.values.get("megatron.args.fp8"):
        conversion.take_back("megatron.args.fp8_recipe", "has no effect without --fp8-format")
    elif has_experts(conversion):
        for key in ("megatron.args.fp8", "megatron.args.fp8_recipe"):
            conversion.take_back(key, "fp8 training covers dense models; mixtures of experts train in train.dtype")
    else:
        conversion.put("megatron.args.transformer_impl", "transformer_engine", "fp8_format", "transformer_impl")


def _settle_placement(conversion: Conversion) -> None:
    values = conversion.values
    gpus = conversion.number("actor_num_nodes", 1) * conversion.number("actor_num_gpus_per_node", 8)
    if conversion.switch("colocate"):
        conversion.take_back("cluster.rollout_num_gpus", "with --colocate engines have the trainer's GPUs")
        if not conversion.is_unknown("actor_num_nodes", "actor_num_gpus_per_node"):
            conversion.put("cluster.rollout_num_gpus", gpus, "colocate")
        if values.get("sync.transport") == "distributed":
            conversion.put("sync.transport", "tensor", "colocate", "update_weight_transport")
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
    """Replace functions of slime by slimectl's counterparts."""
    function = conversion.text("rollout_function_path").replace(":", ".")
    if "fully_async" in function:
        conversion.take_back("rollout.function_path", "run.async_level keeps rounds in progress")
        conversion.put("run.async_level", 2, "rollout_function_path")
    elif function in (GENERATE, SFT) or function.startswith("slime.rollout."):
        conversion.take_back("rollout.function_path", "is a function of slime; slimectl samples rounds itself")
        if function == SFT and conversion.values.get("algorithm.name") != "sft":
            conversion.put("algorithm.name", "sft", "rollout_function_path")
    if conversion.text("data_source_path").startswith("slime."):
        conversion.take_back("rollout.data_source_path", "is a class of slime; slimectl reads rollout.data itself")
    if conversion.text("dynamic_sampling_filter_path").endswith("check_reward_nonzero_std"):
        name = "dynamic_sampling_filter_path"
        conversion.put("rollout.dynamic_sampling_filter_path", "slimectl.stages.filters:nonzero_std", name)


def _ask_for_functions(conversion: Conversion) -> None:
    """List functions of slime that have no stand-in, so that only an installed slime provides them."""
    for key, value in list(conversion.values.items()):
        for path in value if isinstance(value, list) else [value]:
            module, _, name = str(path).rpartition(":")
            if module.startswith("slime.") and name not in STAND_INS.get(module, {}):
                source = conversion.sources[key]
                conversion.drop(key)
                reason = (
                    f"slimectl has no stand-in for it. Set {key} to it with slime installed, or to a function of yours"
                )
                conversion.omissions.append(Omission(source, "", reason, by_hand=True))
                break


def _settle_self_teacher(conversion: Conversion) -> None:
    """A policy that is its own teacher, by a frozen copy, and reads a solution beside the prompt."""
    if conversion.text("opd_type") != "self":
        conversion.take_back("algorithm.opd_jsd_beta", "opd-type is not self", defaults=False)
        return
    conversion.put("algorithm.name", "opd", "opd_type")
    conversion.put("algorithm.opd_self_teacher", "start", "opd_type")
    conversion.take_back("algorithm.opd_teacher_load", "the teacher is the model that the run starts from")
    column = conversion.text("opsd_privileged_info_key")
    if column:
        conversion.put("algorithm.opd_teacher_template", SOLUTION.format(column), "opsd_privileged_info_key")
    conversion.put("algorithm.opd_divergence", "jsd", "opd_type")
    conversion.put("algorithm.opd_top_k", LIKELIEST, "slime compares whole distributions. Such a teacher does not")
    conversion.settled.discard("algorithm.opd_jsd_beta")


def _settle_teachers(conversion: Conversion) -> None:
    """Several teachers by domain, from JSON: a list of tables with name, domain, and rm_url or load."""
    if not conversion.switch("use_mopd"):
        return
    flag = conversion.flags.get("mopd_teachers")
    conversion.drop("algorithm.opd_teachers")
    for name in ("mopd_eps_low", "mopd_eps_high"):
        if name in conversion.flags:
            conversion.put("algorithm.use_tis", True, name)
            conversion.put("algorithm.tis_mode", "mask", name)
    if conversion.text("mopd_distill_type") != "top_k":
        conversion.take_back("algorithm.opd_top_k", "mopd-distill-type is not top_k")
    try:
        entries = json.loads(flag.text) if flag is not None and not flag.problem else []
        teachers = {str(entry["name"]): _teacher(entry) for entry in entries}
    except (ValueError, TypeError, KeyError, AttributeError):
        teachers = {}
    if teachers:
        conversion.put("algorithm.opd_teachers", teachers, "mopd_teachers")
    else:
        conversion.unlist("mopd_teachers")
    if not teachers or not all("url" in teacher or "load" in teacher for teacher in teachers.values()):
        reason = "a table, NAME = {url = [...] or load = DIR, domains = [...]} (docs/guides/distillation.md)"
        conversion.ask_for("algorithm.opd_teachers", reason)


def _teacher(entry: dict[str, Any]) -> dict[str, Any]:
    teacher: dict[str, Any] = {"domains": [str(entry["domain"])]} if "domain" in entry else {}
    if "rm_url" in entry:
        teacher["url"] = [str(entry["rm_url"]).rstrip("/").removesuffix("/generate")]
    if "load" in entry:
        teacher["load"] = str(entry["load"])
    return teacher


LIKELIEST = 64
OF_TEACHERS = ("on_policy_distillation", "slime.rollout.mopd")
"""Parts of the paths of slime's functions that ask a teacher, or replace a reward next to a teacher."""


def _settle_distillation(conversion: Conversion) -> None:
    """Ask the teacher directly, instead of by functions of slime's distillation examples."""
    values = conversion.values
    keys = [f"score.custom_{name}_path" for name in ("rm", "reward_post_process")]
    keys.append("train.custom_advantage_function_path")
    asking = [key for key in keys if any(part in str(values.get(key, "")) for part in OF_TEACHERS)]
    if not asking:
        return
    for key in asking:
        conversion.take_back(key, "slimectl asks the teacher itself")
    conversion.put("algorithm.name", "opd", "custom_rm_path", "advantage_estimator")
    url = conversion.text("rm_url")
    if url:
        conversion.put("algorithm.opd_teacher_url", [url.rstrip("/").removesuffix("/generate")], "rm_url")
        conversion.take_back("score.rm_url", "algorithm.opd_teacher_url asks the teacher")
    elif "algorithm.opd_teacher_load" not in values and not conversion.switch("use_mopd"):
        conversion.unlist("rm_url")
        reason = "the address of a teacher that runs, or its Hugging Face directory as algorithm.opd_teacher_load"
        conversion.ask_for("algorithm.opd_teacher_url", reason)


SLIME = Dialect("slime", "slime", GROUPS, settle, unlisted, common=("Megatron's arguments", "Megatron's model shape"))
