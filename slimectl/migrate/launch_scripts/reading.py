"""Recognizes the kind of a file, finds its training command, and converts it to settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts import foreign
from slimectl.migrate.launch_scripts.conversion import Conversion, Dialect, Omission, canonical, convert, is_on
from slimectl.migrate.launch_scripts.documents import STOCK, yaml_flags
from slimectl.migrate.launch_scripts.flags import Flag, assignments, expanded, is_part_of, options
from slimectl.migrate.launch_scripts.foreign import absent_algorithm
from slimectl.migrate.launch_scripts.launcher import launched
from slimectl.migrate.launch_scripts.openrlhf import OPENRLHF
from slimectl.migrate.launch_scripts.python_files import has_trainer, program_flags, python_flags
from slimectl.migrate.launch_scripts.roll import ROLL
from slimectl.migrate.launch_scripts.shell import Script
from slimectl.migrate.launch_scripts.shell_commands import Command
from slimectl.migrate.launch_scripts.shell_values import Field
from slimectl.migrate.launch_scripts.shell_variables import Note
from slimectl.migrate.launch_scripts.slime import SLIME
from slimectl.migrate.launch_scripts.trl import TRL
from slimectl.migrate.launch_scripts.verl import VERL

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (SLIME, VERL, TRL, OPENRLHF, ROLL)}


PROGRAM = re.compile(r"[\w./~${}-]*\.py")
MODULE = re.compile(r"\w+(\.\w+)+")
OF_LAUNCHERS = ("config_file", "num_processes", "num_machines", "nproc_per_node", "nnodes", "num_gpus")
"""Flags of `accelerate launch` and `torchrun` that set the number of training processes."""
NAMES_OF_FILES = ("config", "config_path", "config_name", "config_dir")
"""Flags that give the file of a configuration, or its folder."""
YAML = (".yaml", ".yml")
IDLE = ("--cfg", "--help")
"""Options with which a program prints something instead of training."""
TELLING_KEYS = {
    "model_name_or_path", "dataset_name", "datasets", "dataset_mixer", "output_dir", "per_device_train_batch_size",
    "num_generations", "reward_funcs", "reward_model_path", "use_vllm", "learning_rate",
}  # fmt: skip
"""A recipe of TRL has at least one of these keys. The others also occur in other kinds of files."""
ROOTS = {
    "verl": ("trainer.", "actor_rollout_ref.", "async_training."),
    "roll": ("pretrain", "actor_", "student_", "sft_"),
}
"""A whole configuration has a key with one of these prefixes. A part of one has none."""
FEWEST_FLAGS = 3
"""Number of known flags from which a command or a document counts as training."""


ANY = ""
"""Matches every value of a switch that is on."""
ALGORITHMS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "openrlhf": {"pretrain_mode": (ANY, "pretrain")},
    "verl": {"algorithm.filter_sample.enable": (ANY, "gfpo")},
}
"""Flags of another algorithm by stack: the value that switches it on, and its name."""
VERL_PROGRAMS = re.compile(
    r"verl|((.*/)?verl[./])?(trainer|experimental)[./].*|(.*[./])?recipe[./](dapo|\w+_policy)[./].*|"
    r"(main|\w*sft)_\w+\.py"
)
"""Programs of verl that are fully described by their flags. Others have their own agent or loss."""


def refuse_other_algorithms(conversion: Conversion) -> None:
    """Raise SettingsError for a flag that switches another algorithm on."""
    for name, (value, algorithm) in ALGORITHMS.get(conversion.dialect.name, {}).items():
        flag = conversion.flags.get(name)
        if flag is not None and is_on(flag) and value in (ANY, conversion.text(name)):
            raise SettingsError(f"{flag.place}: {flag} {absent_algorithm(algorithm)}")


def ask_for_program(conversion: Conversion) -> None:
    """List the program first if it does not belong to verl."""
    launcher = conversion.flags.get("launcher") if conversion.dialect is VERL else None
    if launcher and not VERL_PROGRAMS.fullmatch(launcher.texts[0]):
        reason = "is not a program of verl and is not read. Set what it changes by hand: reward, rollout, loss"
        item = Omission(launcher.texts[0], str(launcher.place), reason, by_hand=True, first=True)
        conversion.omissions.insert(0, item)


@dataclass(frozen=True)
class Launch:
    """A training command in one dialect, with its flags and the program that it starts."""

    dialect: Dialect
    flags: tuple[Flag, ...]
    num_known: int
    launcher: Flag | None = None
    condition: str = ""
    """Why it is unknown whether the script starts it, or an empty string if it does."""


@dataclass(frozen=True)
class Reading:
    """A file as settings, with notes about what was not followed."""

    conversion: Conversion
    notes: list[Note]


def read(
    path: Path, *, stack: str | None = None, root: Path | None = None, line: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Reading:  # fmt: skip
    """Read a launch script, a YAML file or a Python file. Nothing is executed.

    `stack` is the dialect, `root` the folder whose files may be read, `line` selects one of several training commands.
    Raises SettingsError with file and line.
    """
    if stack is not None and stack not in DIALECTS:
        raise SettingsError(f"--from {stack}: give {', '.join(DIALECTS)}")
    dialects = [DIALECTS[stack]] if stack else list(DIALECTS.values())
    if not path.exists():
        raise SettingsError(f"{path}: no such file. Give a launch script, a YAML file or a Python file")
    if purpose := foreign.file_purpose(path):
        raise SettingsError(f"{path}: {purpose}")
    folder = root or path.parent
    if path.suffix in (*YAML, ".json"):
        if line is not None:
            raise SettingsError(f"{path}: is one configuration. Leave --line out, which picks one of several commands")
        launch, notes = _document(path, yaml_flags(path, str(path), environ, folder), dialects, stack), list[Note]()
    elif (script := _script(path, folder, environ, dialects)) is None:
        launch, notes = _document(path, python_flags(path, str(path), environ, line=line), dialects, stack), []
    else:
        launch, notes = _training_command(path, script, dialects, stack, line), script.notes
        if launch.condition and launch.launcher:
            notes.append(Note(launch.launcher.place, f"whether this command is started: {launch.condition}"))
        launch = _with_configuration(launch, path, folder, notes, environ)
        launch = _with_program(launch, path, folder, environ)
    _check_program(launch)
    conversion = convert(launch.dialect, launch.flags, launch.launcher)
    refuse_other_algorithms(conversion)
    ask_for_program(conversion)
    return Reading(conversion, list(dict.fromkeys(notes)))


def _script(path: Path, root: Path, environ: Mapping[str, str], dialects: Sequence[Dialect]) -> Script | None:
    """The commands of a shell script or a Python launcher, or None for a Python file that starts no training."""
    if path.suffix != ".py":
        script = Script(path, root, environ)
        script.launched = launched
        script.follow()
        return script
    launcher = launched(path, root, environ)
    launches = [_launch(command, dialect) for command in launcher.commands for dialect in dialects] if launcher else []
    return launcher if any(launch and launch.num_known >= FEWEST_FLAGS for launch in launches) else None


def _absence(launch: Launch) -> str:
    """The sentence about a program without a counterpart, or an empty string for one that is read."""
    program = launch.launcher.texts[0] if launch.launcher else ""
    return foreign.absent_program(program, {canonical(flag.name) for flag in launch.flags}) if program else ""


def _check_program(launch: Launch) -> None:
    """Raise SettingsError if a command, or the class of a configuration, has no counterpart here."""
    if (purpose := _absence(launch)) and launch.launcher:
        raise SettingsError(f"{launch.launcher.place}: {launch.launcher.texts[0]} {purpose}")
    for flag in launch.flags:
        kind = flag.texts[0] if flag.name == "configuration" and flag.texts else ""
        if purpose := foreign.absent_algorithm(kind):
            raise SettingsError(f"{flag.place}: {kind} {purpose}")


def _known(dialect: Dialect, flags: Sequence[Flag]) -> int:
    """The number of flags that are in a dialect's table, not counting the model's shape."""
    return sum(dialect.knows(canonical(flag.name)) for flag in flags)


def _document(path: Path, flags: list[Flag], dialects: Sequence[Dialect], stack: str | None) -> Launch:
    """The dialect of a document, which is the one with most of its keys. Raises SettingsError for other documents."""
    names = {name for flag in flags for name in (flag.name, flag.name.partition(".")[0])}
    if path.suffix != ".py" and (purpose := foreign.document_purpose(names)):
        raise SettingsError(f"{path}: {purpose}")
    launches = [Launch(dialect, tuple(flags), _known(dialect, flags)) for dialect in dialects]
    best = max(launches, key=lambda launch: launch.num_known)
    is_named = any(flag.name == "configuration" for flag in flags)
    if not stack and best.dialect.name == "trl" and not is_named and not {flag.name for flag in flags} & TELLING_KEYS:
        best = replace(best, num_known=0)
    has_keys = best.num_known >= (1 if stack else FEWEST_FLAGS)
    roots = ROOTS.get(best.dialect.name, ("",))
    if has_keys and path.suffix != ".py" and not any(name.startswith(roots) for name in names):
        raise SettingsError(f"{path}: is a part of a configuration. {foreign.WHOLE}")
    if path.suffix == ".py" and not is_named and (best.dialect.name in ("trl", "slime") or not has_keys):
        raise SettingsError(f"{path}: has no trainer such as GRPOTrainer or GRPOConfig. Give the program that trains")
    if not has_keys and not is_named:
        raise SettingsError(
            f"{path}: has no keys of {' or '.join(item.title for item in dialects)}. Give one with --from"
        )
    return best


def _training_command(
    path: Path, script: Script, dialects: Sequence[Dialect], stack: str | None, line: int | None
) -> Launch:
    """The single training command of a script. Raises SettingsError if there is none, or more than one."""
    launches: dict[str, Launch] = {}
    for command in script.commands:
        if (line is not None and command.place.line != line) or any(field.text in IDLE for field in command.fields):
            continue
        candidates = [launch for dialect in dialects if (launch := _launch(command, dialect)) is not None]
        if not candidates:
            continue
        best = max(candidates, key=lambda launch: launch.num_known)
        if best.num_known >= (1 if stack or line else FEWEST_FLAGS):
            launches.setdefault(f"{best.launcher} {' '.join(map(str, best.flags))}", best)
    if not launches and (launch := _bare_program(path, script, dialects, line)):
        return launch
    if not launches:
        _refuse_foreign(script)
        names = " or ".join(dialect.title for dialect in dialects)
        unread = "".join(f"; {note.place}: {note.text}" for note in [*script.notes, *script.unread][:1])
        if line is not None:
            raise SettingsError(f"{path}:{line}: starts no training of {names}. Leave --line out, or give another line")
        raise SettingsError(f"{path}: no training command of {names}. Give the script that starts the training{unread}")
    present = [launch for launch in launches.values() if not _absence(launch)] or list(launches.values())
    highest = max(launch.num_known for launch in present)
    main = [launch for launch in present if launch.num_known * 2 >= highest]
    if len(main) > 1:
        places = [launch.launcher.place.line for launch in main if launch.launcher]
        lines = ", ".join(map(str, places))
        if len(set(places)) == 1:
            problem = f"is started {len(main)} times with other flags. Read a copy that starts it once"
            raise SettingsError(f"{path}:{places[0]}: {problem}")
        raise SettingsError(f"{path}: has {len(main)} training commands (lines {lines}). Pick one by --line N")
    return main[0]


def _bare_program(path: Path, script: Script, dialects: Sequence[Dialect], line: int | None) -> Launch | None:
    """A command whose program is in the folder and has a trainer of TRL. It has few options, or none."""
    trl = next((dialect for dialect in dialects if dialect.name == "trl"), None)
    for command in script.commands if trl else []:
        launch = _launch(command, trl) if line in (None, command.place.line) and trl else None
        program = launch.launcher.texts[0] if launch and launch.launcher else ""
        document = _document_of(program, path, path.parent) if program.endswith(".py") else None
        if launch and document and has_trainer(document, program):
            return launch
    return None


def _refuse_foreign(script: Script) -> None:
    """Raise SettingsError if a command of a script has a known purpose other than training."""
    for command in script.commands:
        shown = " ".join(field.text for field in command.fields)
        texts = [field.text for field in command.fields]
        purposes = (foreign.absent_program(text) for text in texts if PROGRAM.fullmatch(text) or MODULE.fullmatch(text))
        if purpose := foreign.command_purpose(shown) or next(filter(None, purposes), ""):
            raise SettingsError(f"{command.place}: `{shown if len(shown) <= 60 else f'{shown[:57]}…'}` {purpose}")


def _launch(command: Command, dialect: Dialect) -> Launch | None:
    """A command as a dialect reads it: the words after its program are flags."""
    position = _program(command.fields, dialect)
    if position is None:
        return None
    arguments = command.fields[position + 1 :]
    flags, loose = options(arguments) if dialect.form == "options" else assignments(arguments)
    if dialect.name == "trl":
        flags = [member for flag in flags for member in expanded(flag)]
    before, _ = options(command.fields[:position])
    flags = [flag for flag in before if canonical(flag.name) in OF_LAUNCHERS and _known(dialect, [flag])] + flags
    program = command.fields[position]
    head = Field(program.text, command.place)
    launcher = Flag("launcher", "", (head, *loose), command.place)
    num_known = _known(dialect, flags)
    if dialect.programs and re.search(dialect.programs, program.text):
        num_known += FEWEST_FLAGS
    starters = [field.text.rpartition("/")[2] for field in command.fields[:position]]
    num_known += dialect.name == "trl" and "accelerate" in starters
    return Launch(dialect, tuple(flags), num_known, launcher, command.condition)


def _program(fields: Sequence[Field], dialect: Dialect) -> int | None:
    """The position of the training program in a command, if it is a Python command."""
    for position, field in enumerate(fields):
        before = fields[position - 1].text if position else ""
        if "convert" in field.text and PROGRAM.fullmatch(field.text):
            return None
        if PROGRAM.fullmatch(field.text) or (before in ("-m", "--module") and MODULE.fullmatch(field.text)):
            module = field.text.removesuffix(".py").replace("/", ".")
            if module in ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"):
                continue
            return position
        if dialect.name == "trl" and before.rpartition("/")[2] == "trl" and field.text.isidentifier():
            return position
        if dialect.name == field.text.rpartition("/")[2] == "verl":
            return position
    return None


def _with_configuration(
    launch: Launch, path: Path, root: Path, notes: list[Note], environ: Mapping[str, str]
) -> Launch:
    """Add the flags of a YAML file that the command gives, before the command's own flags."""
    loose = launch.launcher.values[1:] if launch.launcher else ()
    config_flags = options(loose)[0] if launch.dialect.form == "hydra" else ()
    named = {canonical(flag.name): flag for flag in (*launch.flags, *config_flags)}
    launch = _with_processes(launch, named, path, root, environ)
    folder, name, config = (_known_text(named.get(item)) for item in ("config_path", "config_name", "config"))
    folder = folder or _known_text(named.get("config_dir"))
    if name:
        file, place = f"{folder or '.'}/{name.removesuffix('.yaml')}.yaml", named["config_name"].place
    elif config and config.endswith(YAML):
        file, place = config, named["config"].place
    elif launch.dialect is TRL and (recipes := [word for word in loose if word.text.endswith(YAML)]):
        file, place = recipes[0].text, recipes[0].place
    else:
        return launch
    document = _document_of(file, path, root)
    own_flags = [flag for flag in launch.flags if canonical(flag.name) not in NAMES_OF_FILES]
    base: list[Flag] = []
    if document is None and not STOCK.fullmatch(Path(file).stem):
        line = f"{file}: is not read, as no such file lies in {root}. Give that file, or allow a folder by --root"
        notes.append(Note(place, line))
    elif document is not None:
        relative = os.path.relpath(document, path.parent)
        shown = str(document) if relative.startswith("..") else str(path.parent / relative)
        base = yaml_flags(document, shown, environ, root)
    deleted = [flag.name for flag in own_flags if flag.spelling.startswith("~")]
    base = [flag for flag in base if not any(is_part_of(flag.name, name) for name in deleted)]
    return replace(launch, flags=(*base, *own_flags))


def _with_program(launch: Launch, path: Path, root: Path, environ: Mapping[str, str]) -> Launch:
    """Add the configurations of TRL in the Python file that a command starts, before the options of the command."""
    program = launch.launcher.texts[0] if launch.launcher else ""
    document = _document_of(program, path, root) if launch.dialect.name == "trl" and program.endswith(".py") else None
    if document is None:
        return launch
    shown = str(path.parent / os.path.relpath(document, path.parent))
    return replace(launch, flags=tuple(program_flags(document, shown, environ, launch.flags)))


def _document_of(file: str, path: Path, root: Path) -> Path | None:
    """The file with a name, below the script's folder or a parent. For a full path, its last parts are tried there."""
    parts = Path(os.path.normpath(file)).parts
    tails = [Path(*parts[start:]) for start in range(1 if parts[0] == "/" else 0, len(parts))]
    folders = [path.parent, Path(), *path.resolve().parents]
    paths = [Path(file), *(folder / tail for tail in tails for folder in folders)]
    return next((item for item in paths if item.is_file() and item.resolve().is_relative_to(root.resolve())), None)


def _with_processes(
    launch: Launch, named: Mapping[str, Flag], path: Path, root: Path, environ: Mapping[str, str]
) -> Launch:
    """Add the number of processes in a configuration of `accelerate launch --config_file`."""
    file = _known_text(named.get("config_file"))
    document = _document_of(file, path, root) if launch.dialect.name == "trl" and file else None
    if document is None:
        return launch
    sizes = [flag for flag in yaml_flags(document, str(document), environ) if flag.name in OF_LAUNCHERS]
    return replace(launch, flags=(*(flag for flag in sizes if flag.name not in named), *launch.flags))


def _known_text(flag: Flag | None) -> str:
    """The first value of a flag, if it is known."""
    return flag.values[0].text if flag is not None and flag.values and not flag.problem else ""
