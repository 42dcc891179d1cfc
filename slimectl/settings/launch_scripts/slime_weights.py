"""Weights of slime's scripts: what is trained, what engines load, and checkpoints that must be converted first."""

from __future__ import annotations

import re

from slimectl.settings.launch_scripts.conversion import Conversion

SCHEME = re.compile(r"(?i)(?:^|[-_.])(fp8|int4|int8|w8a8|w4a16|nvfp4|mxfp4|mxfp8|awq|gptq)(?=$|[-_.])")
"""A quantization in the name of a folder."""
NATIVE = (
    ("fp8", re.compile(r"(?i)deepseek-(?:r1(?!-distill)|v3)|kimi-k2-instruct")),
    ("int4", re.compile(r"(?i)kimi-k2-thinking")),
    ("mxfp4", re.compile(r"(?i)gpt-oss")),
)
"""Models that are published quantized, by the scheme that they have."""
FULL = re.compile(r"(?i)[-_.](bf16|bfloat16|fp16|fp32)(?=$|[-_.])")
MEGATRON = re.compile(r"(?i)(?:torch[-_]?dist|[-_](?:dist|mcore|megatron))$|^iter_\d+$|^release$")
"""Last part of the path of a checkpoint of Megatron."""
SUFFIX = re.compile(r"(?i)[-_.]+(?:torch[-_]?dist|dist|mcore|megatron|slime|hf|bf16|fp8|int4|nvfp4|mxfp4|mxfp8)$")
EXPERTS = re.compile(r"(?i)\d+B-A\d+(?:\.\d+)?B")
"""Sizes in the name of a mixture of experts: of the whole, and of what is active."""
PUSHED = ("fp8",)
"""Quantizations that pushes of weights can make."""
CHECKPOINTS = {"algorithm.opd_teacher_load": "opd_teacher_load", "algorithm.critic_load": "critic_load"}


def last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def is_megatron(path: str) -> bool:
    """Whether a path names a checkpoint of Megatron, by its last part."""
    return MEGATRON.search(last_part(path)) is not None


def scheme_of(path: str) -> str:
    """Return the quantization of a model's folder, by its name; empty for none.

    >>> scheme_of("/root/Qwen3-30B-A3B-FP8/"), scheme_of("/root/DeepSeek-R1"), scheme_of("/root/DeepSeek-R1-bf16")
    ('fp8', 'fp8', '')
    """
    name = last_part(path)
    if (match := SCHEME.search(name)) is not None:
        return match[1].lower()
    return "" if FULL.search(name) else next((scheme for scheme, names in NATIVE if names.search(name)), "")


def model_name(path: str) -> str:
    """Return the name of the model that a folder holds in some format.

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
    """Decide which weights are trained, which engines load, and which are the reference.

    slime trains what `--load` holds, or else `--ref-load`. `--hf-checkpoint` is the tokenizer and what engines begin
    with; it may be quantized.
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
    """The path of a flag, with what is not known of it left out."""
    flag = conversion.flags.get(name)
    return flag.values[0].text if flag is not None and flag.values else ""


def _start(conversion: Conversion) -> str:
    """The checkpoint that training starts from. `--load` that is `--save` only resumes a run that is there."""
    load, save = _path(conversion, "load").rstrip("/"), _path(conversion, "save").rstrip("/")
    return load if load and load != save else _path(conversion, "ref_load")


def _settle_engine(conversion: Conversion, folder: str, scheme: str) -> None:
    """Give engines the quantized folder, if weights can be pushed in its form."""
    flag = conversion.flags["hf_checkpoint"]
    if scheme not in PUSHED:
        reason = (f"holds {scheme} weights, which cannot be pushed to engines. Leave engine.load out to sample in "
                  "bfloat16, or set it to a folder that `slimectl convert MODEL DIR --quantize fp8` makes")  # fmt: skip
        conversion.omit(flag, reason, by_hand=True)
    elif flag.problem:
        conversion.unlist("hf_checkpoint")
        conversion.omit(flag, f"{flag.problem}; set engine.load by hand", by_hand=True)
    else:
        conversion.put("engine.load", folder, "hf_checkpoint")


def _settle_model(conversion: Conversion, folder: str, start: str, scheme: str) -> None:
    """Train the checkpoint that slime starts from in place of `--hf-checkpoint`."""
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
    """Name the reference only where it is not the model that the run starts from."""
    reference = _path(conversion, "ref_load")
    if model_name(reference) == model_name(start):
        conversion.take_back("algorithm.ref_load", "the reference is the model that the run starts from")
    elif model_name(reference) == model_name(folder) and not scheme_of(folder):
        conversion.put("algorithm.ref_load", folder, "ref_load")
    elif is_megatron(reference) and _compares(conversion):
        _ask_to_convert(conversion, "algorithm.ref_load", "ref_load")


def _compares(conversion: Conversion) -> bool:
    """Whether the algorithm has a divergence from a reference."""
    in_loss = conversion.switch("use_kl_loss") and conversion.real("kl_loss_coef", 0.0) > 0
    return in_loss or conversion.real("kl_coef", 0.0) > 0


def _ask_to_convert(conversion: Conversion, key: str, name: str) -> None:
    """List a checkpoint of Megatron among what the user sets."""
    conversion.drop(key)
    path = _path(conversion, name)
    reason = f"is a checkpoint of Megatron. Set {key} to what `slimectl convert {path} DIR` makes"
    conversion.omit(conversion.flags[name], reason, by_hand=True)
