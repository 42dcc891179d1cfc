"""Turns the flags of another stack into settings, by that stack's table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from slimectl.migrate.launch_scripts.flags import Flag
from slimectl.migrate.launch_scripts.shell_values import Field
from slimectl.settings.effects import ineffective
from slimectl.settings.keys import DEFAULT_ALGORITHM, changed, keys_of
from slimectl.settings.layers import Layer, nested, parse_value
from slimectl.settings.loading import ALTERNATIVES, examine
from slimectl.settings.root import Settings
from slimectl.system.redaction import is_secret_name, remember

MAX_DROPS = 200
ROWS = ("sft", "dpo", "reward_model")
"""Algorithms that read rows and do not sample."""


@dataclass(frozen=True)
class Row:
    """Flags with the same meaning: their names in the other stack, the key here, and how the value changes.

    Without a key, `text` is the reason, and what to do instead.
    """

    names: str
    key: str = ""
    text: str = ""
    convert: Callable[[Flag], Any] | None = None
    """Returns the value, or several values by key. Raises ValueError with the end of a sentence about the flag."""
    secret: bool = False
    """Whether the value is a secret, which is never shown."""
    default: Any = None
    """The other stack's default if ours differs. It is set if the flag is missing. Without a key, it is listed."""
    neutral: str | None = None
    """Without a key, values that change nothing. Any other value changes the training, and the user must set it."""

    def is_neutral(self, flag: Flag) -> bool:
        """Whether a flag without a key leaves the training unchanged."""
        return self.neutral is None or (
            not flag.problem and (",".join(flag.texts) or "true").lower() in self.neutral.split()
        )


def namesakes(
    section: str, names: str, convert: Callable[[Flag], Any] | None = None, *, flag: str = "", default: Any = None
) -> list[Row]:
    """Return the rows of flags whose settings in `section` have the same names. `flag` is the prefix of each name."""
    return [
        Row(f"{flag}{name}", f"{section}.{canonical(name)}", convert=convert, default=default) for name in names.split()
    ]


def renamed(pairs: str, *, flag: str = "") -> list[Row]:
    """Return the rows of flags that have another name here, as NAME=KEY. `flag` is the prefix of each name."""
    return [Row(f"{flag}{name}", key) for name, key in (pair.split("=") for pair in pairs.split())]


def omit_unlisted(conversion: Conversion, flag: Flag) -> None:
    """List a flag that has no row."""
    reason = f"is not in the table of {conversion.dialect.title}. Search for a setting with `slimectl settings explain`"
    conversion.omit(flag, reason)


@dataclass(frozen=True)
class Dialect:
    """A stack whose launch files can be read: its table, and settings that depend on several flags together."""

    name: str
    title: str
    groups: Mapping[str, tuple[Row, ...]]
    settle: Callable[[Conversion], None]
    unlisted: Callable[[Conversion, Flag], None] = omit_unlisted
    """Handles a flag that has no row."""
    form: str = "options"
    """How flags are written: options (`--lr 1e-6`) or hydra (`trainer.nnodes=1`)."""
    negation: str = ""
    """Prefix that turns a switch off (`--no_bf16`)."""
    programs: str = ""
    """Pattern of the names of training programs, whatever their flags."""
    common: tuple[str, ...] = ()
    """Groups whose flags do not identify a training command, because conversion commands accept them too."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of flags, and of the beginnings of dotted names, by the name in the table."""

    def knows(self, name: str) -> bool:
        """Whether a flag indicates this stack."""
        row = self.row(self.name_of(name))
        return row is not None and not any(row in self.groups[group] for group in self.common)

    def name_of(self, name: str) -> str:
        """The name of a flag in the table, with underscores for dashes."""
        name = canonical(name)
        head, dot, tail = name.partition(".")
        return self.aliases.get(name) or (f"{self.aliases.get(f'{head}.', f'{head}.')}{tail}" if dot else name)

    def row(self, name: str) -> Row | None:
        """The row of a name in the table. A table whose keys all lack a counterpart (`NAME`) has one row."""
        if name in self.rows:
            return self.rows[name]
        return next((row for prefix, row in self._tables if name.startswith(prefix)), None)

    @cached_property
    def _tables(self) -> list[tuple[str, Row]]:
        """Rows of whole tables by the prefix of their names, the longest first."""
        rows = [(name, row) for name, row in self.rows.items() if name.endswith("NAME") and not row.key]
        return sorted(((name.removesuffix("NAME"), row) for name, row in rows), key=lambda item: -len(item[0]))

    @cached_property
    def rows(self) -> dict[str, Row]:
        """The row of every name, with underscores for dashes."""
        return {canonical(name): row for rows in self.groups.values() for row in rows for name in row.names.split()}


def canonical(name: str) -> str:
    return name.replace("-", "_")


def stem(program: str) -> str:
    """The last part of the name of a program, which is a path or a module."""
    return program.rpartition("/")[2].removesuffix(".py").rpartition(".")[2]


@dataclass(frozen=True)
class Omission:
    """A flag that became no setting, and the reason."""

    flag: str
    place: str
    reason: str
    by_hand: bool = False
    """Whether the setting exists, but the user must supply its value."""
    first: bool = False
    """Whether it is listed before all others, because a run cannot learn without it."""


@dataclass
class Conversion:
    """Settings collected from flags: values by dotted key, and the flags that each came from."""

    dialect: Dialect
    flags: dict[str, Flag] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    omissions: list[Omission] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    """Flags with the same values as the defaults here, or with values that change nothing."""
    problems: list[str] = field(default_factory=list)
    """Contradictions between settings that only the user can resolve."""
    settings: Settings = field(default_factory=Settings)
    settled: set[str] = field(default_factory=set)
    """Keys that ignore the other stack's default."""
    program_defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of the program that is started, by the first name of a row. They override the row's. None means none."""
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of the flags whose values each key has in the end."""
    _claims: dict[str, dict[str, None]] = field(default_factory=dict)
    """The names of all flags that have set a key, in order."""

    def text(self, name: str, default: str = "") -> str:
        """The first value of a flag, or the default if it is missing or unknown."""
        flag = self.flags.get(name)
        return flag.values[0].text if flag and flag.values and not flag.problem else default

    def switch(self, name: str) -> bool:
        """Whether a switch is on."""
        flag = self.flags.get(name)
        return flag is not None and not flag.condition and is_on(flag)

    def number(self, name: str, default: int) -> int:
        """The value of a flag as a whole number."""
        value = self.real(name, default)
        return int(value) if math.isfinite(value) else default

    def is_unknown(self, *names: str) -> bool:
        """Whether one of the flags is given with a value that cannot be determined from the file."""
        return any(flag.problem for name in names if (flag := self.flags.get(name)) is not None)

    def real(self, name: str, default: float) -> float:
        """The value of a flag as a number, or the default if it is missing or not a number."""
        try:
            return float(self.text(name, str(default)))
        except ValueError:
            return default

    def converted(self, name: str) -> Any:
        """The value of a flag by its row, or None if it is missing, unknown or without a counterpart."""
        flag, row = self.flags.get(name), self.dialect.rows[name]
        if flag is None or flag.problem:
            return None
        try:
            return row.convert(flag) if row.convert else plain(flag)
        except ValueError:
            return None

    def put(self, key: str, value: Any, *sources: str) -> None:
        """Set a key, and record the flags that it came from."""
        self.values[key] = value
        present = [name for name in sources if name in self.flags or name not in self.dialect.rows]
        self.sources[key] = ", ".join(dict.fromkeys(self._source(name) for name in present or sources[:1]))
        self.names[key] = sources
        self._claims.setdefault(key, {}).update(dict.fromkeys(sources))

    def put_known(self, key: str, value: Any, *sources: str) -> None:
        """Set a key unless one of the flags that it came from is unknown."""
        if not self.is_unknown(*sources):
            self.put(key, value, *sources)

    def put_pair(self, name: str, first: str, second: str) -> bool:
        """Set two keys from a flag with two values. Return whether it has two."""
        flag = self.flags.get(name)
        pair = " ".join(flag.texts).strip("[]").replace(",", " ").split() if flag and not flag.problem else []
        if len(pair) == 2:
            self.put(first, pair[0], name)
            self.put(second, pair[1], name)
        return len(pair) == 2

    def put_switched(self, key: str, switch: str, name: str, default: str) -> None:
        """Set a coefficient if the switch that it needs is on."""
        if self.switch(switch):
            self.put(key, self.text(name, default), switch, name)
        else:
            self.take_back(key, f"{switch} is off")

    def name_run(self, name: str) -> None:
        """Split the folder of a run into the folder of all runs and the run's name."""
        if isinstance(self.values.get("run.dir"), str):
            folder, _, run = str(self.values["run.dir"]).rstrip("/").rpartition("/")
            self.put("run.dir", folder or ".", name)
            if "run.name" not in self.values:
                self.put("run.name", run, name)

    def skip_sampling(self) -> None:
        """Ignore the other stack's defaults for sampling, because the algorithm reads rows."""
        self.settled |= {row.key for row in self.dialect.rows.values() if row.key.startswith("rollout.")}
        self.settled |= {"run.rollout_batch_size", "engine.backend", "engine.dtype"}

    def put_default(self, name: str, key: str, value: Any) -> None:
        """Set the other stack's default for a flag, unless the flag or the key is there."""
        row = self.dialect.row(name)
        names = row.names.split() if row else [name]
        if key not in self.values and not any(canonical(item) in self.flags for item in names):
            self.put(key, value, f"the default of {self.dialect.title} for {name}")

    def omit_superseded(self) -> None:
        """List the flags whose key was set by another flag in the end."""
        effective = {name for key in self.values for name in self.names.get(key, ())}
        for key, names in self._claims.items():
            for name in names:
                is_flag = name in self.flags and name not in ("launcher", "configuration")
                if key in self.values and is_flag and name not in effective:
                    self.omit(self.flags[name], f"{self.sources[key]} decides {key}")

    def _source(self, name: str) -> str:
        flag = self.flags.get(name)
        if flag is not None:
            return f"{flag} ({flag.place})"
        return f"the default of {self.dialect.title} for {name}" if name in self.dialect.rows else name

    def drop(self, *keys: str) -> None:
        """Drop keys without listing them."""
        for key in keys:
            self.values.pop(key, None)
            self.sources.pop(key, None)

    def take_back(self, key: str, reason: str, *, defaults: bool = True) -> None:
        """Drop a key again, and list its flags. A default is only listed with `defaults`."""
        if key in self.values:
            del self.values[key]
            source = self.sources.pop(key)
            if defaults or not source.startswith("the default of "):
                self.omissions.append(Omission(source, "", reason))

    def unlist(self, *names: str) -> None:
        """Remove flags from the list of flags without a counterpart: together with others they have one."""
        shown = {str(self.flags[name]) for name in names if name in self.flags}
        self.omissions = [item for item in self.omissions if item.flag not in shown]

    def note_equal(self, *names: str) -> None:
        """List flags that need no line, because slimectl does the same without them."""
        self.defaults += [f"{flag} ({flag.place})" for name in names if (flag := self.flags.get(name)) is not None]

    def omit(self, flag: Flag, reason: str, *, by_hand: bool = False, first: bool = False) -> None:
        self.omissions.append(Omission(str(flag), str(flag.place), reason, by_hand or first, first))

    def note_default(self, name: str, value: Any, reason: str) -> None:
        """List a default of the other stack that is not transferred."""
        shown = f"the default of {self.dialect.title} for {name}{'' if value is None else f', {value}'}"
        self.omissions.append(Omission(shown, "", reason))

    def ask_for(self, key: str, reason: str, *, first: bool = True) -> None:
        """List a setting that the user must set, before all flags unless `first` is false."""
        self.omissions.append(Omission(key, "", reason, by_hand=True, first=first))


def is_on(flag: Flag) -> bool:
    """The value of a switch, which may be spelled out."""
    return not flag.values or flag.values[0].text.lower() not in ("false", "0", "no", "off", "none", "null")


def convert(dialect: Dialect, flags: Sequence[Flag], launcher: Flag | None = None) -> Conversion:
    """Convert the flags of a training command. `launcher` is the program that it starts."""
    conversion = Conversion(dialect)
    for flag in flags:
        flag = _negated(dialect, flag)
        name = dialect.name_of(flag.name)
        earlier = conversion.flags.get(name)
        if earlier is not None and name not in REPEATABLE:
            conversion.omit(earlier, f"is given again in {flag.place}, which counts")
        elif earlier is not None:
            flag = Flag(flag.name, flag.spelling, (*earlier.values, *flag.values), flag.place, flag.condition)
        flag = replace(flag, name=name)
        conversion.flags.pop(name, None)
        conversion.flags[name] = flag
    names = list(conversion.flags)
    if launcher is not None:
        conversion.flags["launcher"] = launcher
    for name in names:
        flag = conversion.flags[name]
        row = dialect.row(name)
        if is_secret_name(flag.name) or (row is not None and row.secret):
            for value in flag.values:
                remember(value.text)
        if row is None:
            dialect.unlisted(conversion, flag)
        else:
            take(conversion, flag, row)
    dialect.settle(conversion)
    if str(conversion.values.get("cluster.actor_num_nodes", 1)) not in ("0", "1"):
        conversion.put("cluster.executor", "ray", *conversion.names["cluster.actor_num_nodes"])
    conversion.omit_superseded()
    _take_defaults(conversion)
    _check(conversion)
    _ask_for_reward(conversion)
    conversion.omissions.sort(key=lambda omission: not omission.first)
    return conversion


def _negated(dialect: Dialect, flag: Flag) -> Flag:
    """`--no_NAME` as NAME turned off, if the stack has such flags."""
    name = canonical(flag.name)
    rest = name.removeprefix(dialect.negation)
    if rest == name or flag.values or name in dialect.rows or rest not in dialect.rows:
        return flag
    return Flag(rest, f"--{rest}", (Field("false", flag.place),), flag.place, flag.condition)


REPEATABLE = ("eval_prompt_data", "rollout_sample_hook_path")
"""Flags that append to their earlier value when repeated."""


def take(conversion: Conversion, flag: Flag, row: Row) -> None:
    """Set the key of a flag by its row, or list the flag with the reason."""
    if not row.key and row.neutral and row.is_neutral(flag):
        conversion.note_equal(flag.name)
        return
    if not row.key:
        conversion.omit(flag, row.text, by_hand=not row.is_neutral(flag))
        return
    unknown = next((value.problem for value in flag.values if value.unknown), "")
    partial = next((value.problem for value in flag.values if value.unset and value.text), "")
    problem = flag.condition or ("" if getattr(row.convert, "needs_no_value", False) else unknown or partial)
    values = tuple(value for value in flag.values if value.text or not value.unset)
    if not problem and flag.values and not values:
        problem = flag.problem
    if problem:
        conversion.omit(flag, f"{problem}. Set {row.key} by hand", by_hand=True)
        return
    known_flag = Flag(flag.name, flag.spelling, values, flag.place)
    try:
        value = row.convert(known_flag) if row.convert else plain(known_flag)
    except Unneeded as error:
        if str(error):
            conversion.omit(flag, str(error))
        else:
            conversion.note_equal(flag.name)
        return
    except ValueError as error:
        line = str(error).removesuffix(". Set the key by hand")
        remedy = "" if f"Set {row.key}" in line else f". Set {row.key} by hand"
        conversion.omit(flag, f"{line}{remedy}", by_hand=True)
        return
    for key, item in value.items() if isinstance(value, Many) else [(row.key, value)]:
        conversion.put(key, item, canonical(flag.name))


class Unneeded(ValueError):
    """A value that needs no setting, because slimectl already does the same. Its text, if it has one, is the reason."""


class Many(dict[str, Any]):
    """Values of several keys, from one flag."""


def plain(flag: Flag) -> Any:
    """The value unchanged: true for a switch, a list for several."""
    if not flag.values:
        return True
    texts = [None if text.lower() in ("none", "null") else text for text in flag.texts]
    return texts[0] if len(texts) == 1 else texts


def typed(flag: Flag) -> Any:
    """The value with its type read from its text, for tables of another program's arguments."""
    texts = [re.sub(r"\A([-+]?\d+)\.\Z", r"\1.0", text) for text in flag.texts]  # TOML has no `1.`
    values = [parse_value(text.lower() if text in ("True", "False") else text) for text in texts]
    return True if not values else values[0] if len(values) == 1 else values


def _take_defaults(conversion: Conversion) -> None:
    """Set the other stack's defaults wherever slimectl's differ."""
    for name, row in conversion.dialect.rows.items():
        default = conversion.program_defaults.get(name, row.default)
        if default is None or row.key in conversion.values:
            continue
        is_first = name == canonical(row.names.split()[0])
        if not is_first or any(canonical(item) in conversion.flags for item in row.names.split()):
            continue
        source = f"the default of {conversion.dialect.title} for {row.names.split()[0]}"
        if not row.key:
            conversion.note_default(row.names.split()[0], default, row.text)
            continue
        section, _, key = row.key.partition(".")
        if section == "algorithm" and key not in _algorithm_keys(conversion):
            continue
        if section == "eval" and not any(item.startswith("eval.data.") for item in conversion.values):
            continue
        alternatives = ALTERNATIVES.get(section, ()) if key in ALTERNATIVES.get(section, ()) else ()
        if row.key in conversion.settled or any(f"{section}.{item}" in conversion.values for item in alternatives):
            continue
        conversion.put(row.key, default, source)


REWARDS = ("score.rm_type", "score.rm", "score.custom_rm_path", "rollout.env", "rollout.function_path")
"""Settings that define the reward, or that come with one."""


def _ask_for_reward(conversion: Conversion) -> None:
    """List the reward first if the algorithm needs one and the file has none."""
    algorithm = conversion.settings.algorithm
    is_asked = any(item.first or (item.by_hand and item.flag == "algorithm.name") for item in conversion.omissions)
    if is_asked or not getattr(algorithm, "learns_from_rewards", False) or conversion.values.keys() & set(REWARDS):
        return
    for position, item in enumerate(conversion.omissions):
        if item.by_hand and re.search(r"\bscore\.(rm|custom_rm)", item.reason):
            conversion.omissions[position] = replace(item, first=True)
            return
    conversion.ask_for(
        "score.rm_type", "the file has no reward. Set a verifier, or a function as score.custom_rm_path "
        "(docs/verifiers.md)"
    )  # fmt: skip


def _algorithm_keys(conversion: Conversion) -> list[str]:
    return keys_of("algorithm", str(conversion.values.get("algorithm.name", DEFAULT_ALGORITHM)))


def _check(conversion: Conversion) -> None:
    """Validate the settings. List flags with values that are rejected, have no effect, or equal the defaults."""
    name, names = conversion.values.get("algorithm.name", DEFAULT_ALGORITHM), _algorithm_keys(conversion)
    for key in list(conversion.values):
        if key.startswith("algorithm.") and key.partition(".")[2] not in names:
            conversion.take_back(key, f"has no effect with algorithm.name = {name}")
    for _ in range(MAX_DROPS):
        resolution, errors = examine([Layer("launch", nested(conversion.values))])
        conversion.settings = resolution.settings
        refused = [(line, key) for line in errors for key in conversion.values if _is_about(line, key)]
        idle = {name: line for name, _, line in ineffective(resolution.settings)}
        if idle:
            for name, line in idle.items():
                reason = line.removeprefix(f"{name} ").removesuffix(", or drop it.")
                for key in [key for key in conversion.values if key == name or key.startswith(f"{name}.")]:
                    conversion.take_back(key, f"{name} {reason}", defaults=False)
        elif refused:
            line, key = refused[0]
            conversion.take_back(key, line.replace(" (launch)", ""))
        else:
            conversion.problems = errors
            break
    different = set(changed(conversion.settings))
    for key in list(conversion.values):
        if ".".join(key.split(".")[:2]) not in different:
            del conversion.values[key]
            source = conversion.sources.pop(key)
            if not source.startswith("the default of "):
                conversion.defaults.append(source)


def _is_about(line: str, key: str) -> bool:
    """Whether an error is about one value: `train.lr: input should be …, not 'x' (launch)`."""
    return line.startswith(f"{'.'.join(key.split('.')[:2])}: ") and "(launch)" in line
