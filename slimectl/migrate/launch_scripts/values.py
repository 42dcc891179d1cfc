"""Conversions of values between stacks, each from a flag to the value of a setting."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slimectl.migrate.launch_scripts.conversion import Many, Unneeded, is_on
from slimectl.migrate.launch_scripts.flags import Flag
from slimectl.plugins.registry import VERIFIERS
from slimectl.system.redaction import is_reference


def off(flag: Flag) -> bool:
    """A switch that turns off what the setting turns on."""
    return not is_on(flag)


on = is_on


class Always:
    """The same value whenever the flag is on, whatever its own value is."""

    needs_no_value = True

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, flag: Flag) -> Any:
        """Return the value. Raises Unneeded if the flag is off."""
        if not is_on(flag):
            raise Unneeded
        return self.value


NOT_TRUNCATED = "slimectl.stages.filters:leave_out_truncated"
KERNELS = "kernels are chosen by the trainer; sequences are packed without padding"
OBJECTIVE = "the loss is one of docs/algorithms.md; train.custom_loss_function_path is your own"
LOSS = "the loss has no such part. Write it as train.custom_loss_function_path (docs/hooks.md), or leave it out"
REWARD = "rewards are not changed. Write it as score.custom_reward_post_process_path, or leave it out"
FILTERED = "groups are filtered by rollout.dynamic_sampling_filter_path (docs/agents.md). Set it to a function of yours"
SOLUTION = "{{prompt}}\n\nA reference solution is:\n{{metadata.{}}}\n\nSolve the problem in your own words."
"""What a teacher reads that is the policy itself: the prompt and a column of the row."""
OFF = "false off no none null 0 0.0"
"""Values of a flag that is off."""


def choice(names: str = "", **others: Any) -> Callable[[Flag], Any]:
    """Convert a choice. `names` are the same here, and `others` have another name or value."""
    values = dict.fromkeys(names.split()) | others
    values |= {name: name for name in names.split()}

    def convert(flag: Flag) -> Any:
        name = flag.text.strip().lower().replace("-", "_")
        if name not in values:
            raise ValueError(
                f"{flag.text} has no counterpart. Available: {', '.join(sorted(set(map(str, values.values()))))}"
            )
        return values[name]

    return convert


def number(flag: Flag) -> float:
    try:
        return float(flag.text)
    except ValueError:
        raise ValueError(f"{flag.text!r} is not a number. Set the key by hand") from None


def integer(flag: Flag) -> int:
    value = number(flag)
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"{flag.text!r} is not an integer. Set the key by hand")
    return int(value)


def positive(flag: Flag, lowest: int = 1) -> int:
    """A count. Any value below the lowest means none."""
    value = integer(flag)
    if value < lowest:
        raise Unneeded(f"{flag.text} means none, as here")
    return value


def rounds(flag: Flag) -> str:
    """A number of rounds. Raises Unneeded for none."""
    if integer(flag) <= 0:
        raise Unneeded("trains nothing and only evaluates. Use `slimectl eval`")
    return flag.text


def share(flag: Flag) -> float:
    """A fraction from 0 to 1, where 0 means none."""
    value = number(flag)
    if not value > 0:
        raise Unneeded(f"{flag.text} means none, as here")
    return value


def weights(flag: Flag) -> list[float]:
    """One number for each source. A single source needs none."""
    numbers = [float(word) for text in flag.texts for word in text.strip("[]").split(",") if word.strip()]
    if len(numbers) < 2:
        raise Unneeded("is the weight of one source")
    return numbers


def optimizer(flag: Flag) -> Many:
    """An optimizer by its name in transformers. Its 8-bit variants keep moments in int8."""
    name = flag.text.strip().lower()
    if "muon" in name:
        return Many({"train.optimizer": "muon"})
    if "adam" not in name:
        raise ValueError(f"{flag.text} has no counterpart. Available: adamw, muon")
    if "8bit" not in name:
        raise Unneeded(f"{flag.text} is adamw, as here")
    return Many({"train.optimizer_state_dtype": "int8"})


def mib(flag: Flag) -> int:
    """Bytes to MiB."""
    return max(1, integer(flag) >> 20)


def json_object(flag: Flag) -> Any:
    """A JSON object, in one word or in several."""
    try:
        value = json.loads(" ".join(flag.texts))
    except (json.JSONDecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object. Write it as a table by hand")
    return value


def image_column(flag: Flag) -> str:
    """`{"image": "COLUMN"}` as the name of the column."""
    columns = json_object(flag)
    others = sorted(columns.keys() - {"image"})
    if others or not isinstance(columns.get("image"), str):
        raise ValueError(f"has a column of {others[0] if others else 'nothing'}; this version reads images only")
    return str(columns["image"])


def texts(flag: Flag) -> list[str]:
    """Words, as a list."""
    return [text for text in flag.texts if text.lower() not in ("none", "null")]


def layers(flag: Flag) -> list[str]:
    """Names of layers with an adapter, between blanks or commas. Raises Unneeded for all, the default here."""
    names = comma_separated(flag)
    if names in (["all-linear"], ["all"]):
        raise Unneeded(f"{names[0]} is the default here")
    return names


def above_one(flag: Flag) -> int:
    """A size, where 1 means none."""
    return positive(flag, 2)


def comma_separated(flag: Flag) -> list[str]:
    """Names between blanks or commas, as a list."""
    return [part.strip() for text in texts(flag) for part in text.split(",") if part.strip()]


def function_path(flag: Flag) -> str:
    """`package.module.function` as `package.module:function`. The path of a file is unchanged."""
    text = flag.text
    module, _, name = text.rpartition(".")
    return text if ":" in text or not module or name == "py" else f"{module}:{name}"


def function_paths(flag: Flag) -> list[str]:
    return [function_path(Flag(flag.name, flag.spelling, (value,), flag.place)) for value in flag.values]


def addresses(flag: Flag) -> list[str]:
    """`HOST:PORT` as `http://HOST:PORT`."""
    return [text if "://" in text else f"http://{text}" for text in comma_separated(flag)]


def verifier(flag: Flag) -> str:
    """The name of a verifier, optionally after `boxed_`. Raises ValueError for an unknown one."""
    name = flag.text.strip()
    if name.removeprefix("boxed_") not in VERIFIERS.names():
        raise ValueError(f"{name} is not a verifier here. Set score.rm_type to one, or score.custom_rm_path")
    return name


def secret(variable: str) -> Callable[[Flag], str]:
    """A reference to an environment variable. A key itself is never copied."""

    def convert(flag: Flag) -> str:
        return flag.texts[0] if flag.texts and is_reference(flag.texts[0]) else f"env:{variable}"

    return convert


def dataset_pairs(flag: Flag) -> Many:
    """`NAME PATH NAME PATH …` as a table of datasets. A single path is called aime."""
    pairs = flag.texts if len(flag.texts) != 1 else ["aime", *flag.texts]
    if len(pairs) % 2:
        raise ValueError("has a name without a path. Write eval.data.NAME = PATH by hand")
    return Many({f"eval.data.{dataset_name(name)}": path for name, path in zip(pairs[::2], pairs[1::2], strict=True)})


def dataset_name(name: str) -> str:
    """A name that is allowed in a dotted key."""
    return "".join(character if character.isalnum() or character in "_-" else "_" for character in name) or "data"


def named_datasets(flag: Flag) -> Many:
    """Paths as a table of datasets, each called after its file, or after its folder if the file's name is generic."""
    data: dict[str, str] = {}
    for path in comma_separated(flag):
        parts = [part for part in path.split("@")[0].split("/") if part]
        stems = [part.rsplit(".", 1)[0] for part in parts]
        name = dataset_name(stems[-1] if stems else "data")
        if name in ("test", "val", "valid", "validation", "eval", "dev", "train") and len(stems) > 1:
            name = dataset_name(stems[-2])
        while f"eval.data.{name}" in data:
            name += "_2"
        data[f"eval.data.{name}"] = path
    return Many(data)


def bounds(key: str) -> Callable[[Flag], Many]:
    """`LOW_HIGH` as the values of KEY_low and KEY. A single number is the upper bound."""

    def convert(flag: Flag) -> Many:
        low, _, high = flag.text.rpartition("_")
        try:
            return Many({key: float(high)} | ({f"{key}_low": float(low)} if low else {}))
        except ValueError:
            raise ValueError(f"{flag.text} is not LOW_HIGH. Set {key}_low and {key} by hand") from None

    return convert


def ahead(flag: Flag) -> int:
    """A fraction of stale samples, as whole rounds ahead."""
    return positive(replace(flag, values=(replace(flag.values[0], text=str(math.ceil(number(flag)))),)))


def trackers(flag: Flag) -> list[str]:
    """Names of trackers. The console is stdout."""
    library = {"console": "stdout", "tensorboard": "tensorboard", "wandb": "wandb", "swanlab": "swanlab",
               "mlflow": "mlflow", "trackio": "trackio", "stdout": "stdout"}  # fmt: skip
    names = [library[name] for name in map(str.lower, comma_separated(flag)) if name in library]
    return list(dict.fromkeys(["stdout", *names]))
