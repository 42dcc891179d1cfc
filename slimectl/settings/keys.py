"""Keys of the settings: lists all or the changed ones, suggests a key for an unknown name, and writes TOML."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from slimectl.settings import aliases
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.settings.base import section_class
from slimectl.settings.rollout_algorithms import Grpo
from slimectl.settings.root import Settings
from slimectl.system.redaction import redact

DEFAULT_ALGORITHM: str = Grpo.model_fields["name"].default


def flat(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Yield every dotted key with its value, in the order of the reference."""
    for section, keys in settings.model_dump(by_alias=True).items():
        for key, value in keys.items():
            yield f"{section}.{key}", value


def changed(settings: Settings) -> Iterator[str]:
    """Yield the dotted keys whose values differ from the defaults of the selected algorithm."""
    algorithm = type(settings.algorithm)()
    defaults = dict(flat(Settings(algorithm=algorithm))) | {"algorithm.name": DEFAULT_ALGORITHM}
    for section in settings.__pydantic_extra__ or ():
        if cls := section_class(section):
            defaults |= {f"{section}.{key}": value for key, value in cls().model_dump(by_alias=True).items()}
    for name, value in flat(settings):
        if name not in defaults or value != defaults[name]:
            yield name


def unused_interpreters(backend: Any) -> set[str]:
    """Return the interpreter settings of engines other than engine.backend."""
    return {f"{engine}.python" for engine in ("sglang", "vllm") if engine != backend}


def keys_of(section: str, algorithm: str | None = None) -> list[str]:
    """Return the keys of a section. For [algorithm], return the keys of one algorithm or of all."""
    if section == "algorithm":
        classes: list[type[BaseModel]] = [ALGORITHMS[algorithm]] if algorithm in ALGORITHMS else [*ALGORITHMS.values()]
    elif section in Settings.model_fields:
        annotation = Settings.model_fields[section].annotation
        classes = [annotation] if isinstance(annotation, type) else list(get_args(annotation))
    else:
        cls = section_class(section)
        classes = [] if cls is None else [cls]
    names = [field.alias or name for cls in classes for name, field in cls.model_fields.items()]
    return list(dict.fromkeys(names))


def sections() -> dict[str, list[str]]:
    """Return every section with its keys, including the keys of all algorithms."""
    return {section: keys_of(section) for section in Settings.model_fields}


def setting_names() -> list[str]:
    """Return every dotted key, including the keys of all algorithms."""
    return [f"{section}.{key}" for section, keys in sections().items() for key in keys]


def settings_toml(settings: Settings) -> str:
    """Serialise all settings to TOML, including defaults but not defaults of None.

    Secrets are masked and must be supplied again with the file. TOML has no null, so a None that is not the default is
    written as the string "none", which the loader reads back.
    """
    import tomli_w

    sections: dict[str, dict[str, Any]] = {}
    for section, keys in redact(settings.model_dump(by_alias=True)).items():
        for key, value in keys.items():
            if value is not None:
                sections.setdefault(section, {})[key] = _without_none(value) if section == "custom" else value
            elif section == "custom" or _default(getattr(settings, section), key) is not None:
                sections.setdefault(section, {})[key] = "none"
    return tomli_w.dumps(sections)


def toml_value(value: Any) -> str:
    """Format a value in the syntax of `-s`."""
    import tomli_w

    if value is None:
        return "none"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


def _without_none(value: Any) -> Any:
    """Drop None inside the user's tables and lists, because TOML cannot express it."""
    if isinstance(value, dict):
        return {key: _without_none(member) for key, member in value.items() if member is not None}
    return [_without_none(member) for member in value if member is not None] if isinstance(value, list) else value


def _default(section: BaseModel, key: str) -> Any:
    """Return the default of a key, given its name in files."""
    fields = type(section).model_fields
    field = fields.get(key) or next((field for field in fields.values() if field.alias == key), None)
    return field.get_default(call_default_factory=True) if field else None


OTHER_NAMES = {
    "algorithm.eps_clip": ("cliprange", "clip_range", "clip_ratio", "epsilon", "clip_eps"),
    "algorithm.eps_clip_high": ("epsilon_high", "clip_ratio_high", "clip_high"),
    "algorithm.kl_loss_coef": ("kl_beta", "kl_penalty", "kl_coefficient"),
    "algorithm.name": ("advantage_estimator", "adv_estimator", "loss_type"),
    "eval.interval": ("eval_steps", "test_freq", "eval_every"),
    "model.path": ("model_name_or_path", "model_name", "hf_checkpoint", "pretrain"),
    "rollout.data": ("prompt_data", "dataset", "dataset_name", "train_files", "train_dataset"),
    "rollout.input_key": ("prompt_key", "prompt_column"),
    "rollout.label_key": ("answer_key", "ground_truth_key", "target_key"),
    "rollout.max_prompt_len": ("max_prompt_length",),
    "rollout.max_response_len": (
        "max_new_tokens", "max_tokens", "max_completion_length", "max_response_length", "response_length",
    ),
    "rollout.n_samples_per_prompt": ("num_generations", "group_size", "n", "rollout_n"),
    "run.dir": ("output_dir", "save_dir", "default_local_dir"),
    "run.num_epoch": ("epochs", "num_train_epochs", "total_epochs", "num_epochs"),
    "run.num_rollout": ("max_steps", "total_training_steps", "rounds", "num_rounds", "steps"),
    "run.rollout_batch_size": ("train_batch_size", "prompts_per_step"),
    "run.save_interval": ("save_steps", "save_freq", "save_every"),
    "score.custom_rm_path": ("reward_function", "reward_funcs", "reward_fn", "custom_reward_function"),
    "score.rm_type": ("verifier", "reward", "reward_type"),
    "track.with": ("report_to", "logger", "trackers"),
    "train.clip_grad": ("max_grad_norm", "gradient_clip", "grad_clip", "gradient_clipping"),
    "train.global_batch_size": ("batch_size", "mini_batch_size", "ppo_mini_batch_size", "minibatch_size"),
    "train.lr": ("learning_rate", "learningrate", "actor_learning_rate"),
    "train.lr_decay_style": ("lr_scheduler_type", "lr_scheduler", "scheduler"),
    "train.lr_warmup_iters": ("warmup_steps", "lr_warmup_steps", "num_warmup_steps"),
    "train.lr_warmup_fraction": ("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio"),
    "train.deterministic": ("full_determinism", "deterministic_mode"),
    "train.micro_batch_size": ("per_device_train_batch_size", "micro_train_batch_size"),
}  # fmt: skip
"""Setting -> its names in other programs (TRL, verl, OpenRLHF, transformers)."""

_BY_OTHER_NAME = {other_name: key for key, names in OTHER_NAMES.items() for other_name in names}


def suggestion(name: str, available: Sequence[str], *, elsewhere: Sequence[str] = ()) -> str | None:
    """Return the setting that an unknown name most likely means, or None if none is similar.

    >>> suggestion("train.learning_rate", ["train.lr", "train.lora_rank"])
    'train.lr'

    Tried in this order: the setting that has this name in other programs, the most similar of the `available` ones, one
    with the same last part, and one whose last part or name in other programs is similar. Settings `elsewhere` are not
    compared by similarity.

    >>> suggestion("lerning_rate", ["train.lr", "train.lora_rank"])
    'train.lr'
    """
    leaf = name.rpartition(".")[2].lower().replace("-", "_")
    other_name = _BY_OTHER_NAME.get(leaf)
    if other_name is not None and other_name in {*available, *elsewhere}:
        return other_name
    near = difflib.get_close_matches(name, available, n=1, cutoff=0.6)
    if near:
        return aliases.current_name(near[0])
    names = {key.rpartition(".")[2]: key for key in reversed(available)}
    names |= {other: key for other, key in _BY_OTHER_NAME.items() if key in {*available, *elsewhere}}
    misspelled = difflib.get_close_matches(leaf, names, n=1, cutoff=0.8)
    exact = keys_of_leaf(leaf, [*available, *elsewhere])
    return next(iter(exact), names[misspelled[0]] if misspelled else None)


def keys_of_leaf(leaf: str, available: Sequence[str]) -> list[str]:
    """Return the two-part keys that end in `leaf`, with [train] and [run] first.

    >>> keys_of_leaf("lr", ["sft_warmup.lr", "train.lr", "algorithm.grpo.lr"])
    ['train.lr', 'sft_warmup.lr']
    """
    matches = [key for key in available if key.count(".") == 1 and key.partition(".")[2] == leaf]
    return sorted(matches, key=lambda key: key.partition(".")[0] not in ("train", "run"))
