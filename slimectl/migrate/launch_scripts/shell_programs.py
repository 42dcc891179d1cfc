"""Programs in scripts: ones that only write or change text, and ones that start another script."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from functools import partial

from slimectl.migrate.launch_scripts.shell_values import Field, ShellExpression, checked, joined
from slimectl.migrate.launch_scripts.shell_words import Place

CLASSES = {"[:upper:]": "A-Z", "[:lower:]": "a-z", "[:digit:]": "0-9", "[:space:]": " \t\n", "[:alpha:]": "A-Za-z",
           "[:alnum:]": "A-Za-z0-9"}  # fmt: skip
ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}
SUBSTITUTION = re.compile(r"s([/|,#:@])((?:(?!\1).)*)\1((?:(?!\1).)*)\1(g?)\Z")
PLAIN = re.compile(r"\^?(?:[\w\s.=:,/@%_-]|\.\*|\\[./])*\$?\Z")
"""Expressions of sed that mean the same in Python."""
AWK = re.compile(r"\s*\{\s*print\s+(?:\$(\d+|NF)|(NF))\s*;?\s*\}\s*\Z")
EXPRESSION = re.compile(r"\d{1,18}|[-+*/%()]")
"""A word of `expr` in arithmetic with integers."""
MAX_LINES = 10_000
"""Maximum number of lines that a program reads or writes."""
SILENT = (
    "set", "shopt", "trap", "ulimit", "umask", "wait", "sleep", "echo", "printf", "true", ":", "pwd", "dirname",
    "basename", "realpath", "readlink",
)  # fmt: skip
"""Commands that always succeed, and that are not part of a training command."""
NOT_EXECUTED = "it is the output of a command"


def output(name: str, argv: Sequence[Field], stdin: Field | None, place: Place) -> Field:
    """The output of a command. It is known if its words and its stdin are, and it only changes text."""
    program = (WRITERS if stdin is None else FILTERS).get(name)
    arguments = [field for field in argv if field.text != "--"]
    full = joined([*arguments, stdin] if stdin else arguments, place, " ")
    if program is None:
        return Field("", place, "" if name in SILENT else NOT_EXECUTED)
    if full.unknown:
        return full
    text = None
    if full.text.count("\n") <= MAX_LINES:
        text = program([field.text for field in arguments], stdin.text if stdin else "")
    return Field("", place, NOT_EXECUTED) if text is None else full.with_text(text)


def _characters(text: str) -> str:
    """The characters of a set of tr, with ranges expanded.

    >>> _characters("a-d_")
    'abcd_'
    """
    for name, characters in (CLASSES | ESCAPES).items():
        text = text.replace(name, characters)

    def span(match: re.Match[str]) -> str:
        return "".join(map(chr, range(ord(match[1]), min(ord(match[2]), ord(match[1]) + 128) + 1)))

    return re.sub(r"(.)-(.)", span, text)


def _tr(argv: Sequence[str], text: str) -> str | None:
    """
    >>> _tr(["[:upper:]", "[:lower:]"], "Qwen3-VL"), _tr(["-d", "VL"], "Qwen3-VL")
    ('qwen3-vl', 'Qwen3-')
    """
    if len(argv) != 2 or (argv[0].startswith("-") and argv[0] != "-d"):
        return None
    if argv[0] == "-d":
        return "".join(character for character in text if character not in _characters(argv[1]))
    old, new = map(_characters, argv)
    if not old or not new:
        return None
    return text.translate(str.maketrans(old, new.ljust(len(old), new[-1])[: len(old)]))


def _cut(argv: Sequence[str], text: str) -> str | None:
    """
    >>> _cut(["-d/", "-f2"], "org/name"), _cut(["-d", "-", "-f", "1,3"], "a-b-c")
    ('name', 'a-c')
    """
    match = re.fullmatch(r"(?:-d\s?(.)\s)?-f\s?(\d+(?:,\d+)*)(?:\s-d\s?(.))?", " ".join(argv), re.DOTALL)
    if match is None:
        return None
    separator, numbers = match[1] or match[3] or "\t", [int(number) for number in match[2].split(",")]
    lines = []
    for line in text.split("\n"):
        parts = line.split(separator)
        selection = [parts[number - 1] for number in sorted(set(numbers)) if 0 < number <= len(parts)]
        lines.append(line if len(parts) == 1 else separator.join(selection))
    return "\n".join(lines)


def _sed(argv: Sequence[str], text: str) -> str | None:
    """
    >>> _sed(["s/-Instruct//g; s/Qwen/qwen/"], "Qwen-7B-Instruct")
    'qwen-7B'
    """
    scripts = [word for word in argv if word not in ("-e", "-E", "-r")]
    for command in (part.strip() for script in scripts for part in script.split(";") if part.strip()):
        match = SUBSTITUTION.fullmatch(command)
        if match is None or not PLAIN.match(match[2]) or re.search(r"[\\&]", match[3]) or match[2].count("*") > 1:
            return None
        expression, new = re.compile(match[2]), match[3]
        count = 0 if match[4] else 1
        text = "\n".join(expression.sub(lambda _, new=new: new, line, count=count) for line in text.split("\n"))  # type: ignore[misc]
    return text if scripts else None


def _awk(argv: Sequence[str], text: str) -> str | None:
    """
    >>> _awk(["-F,", "{print NF}"], "0,1,2"), _awk(["{print $2}"], "a b")
    ('3', 'b')
    """
    arguments = list(argv)
    separator = None
    if arguments and arguments[0].startswith("-F"):
        separator = arguments.pop(0)[2:] or (arguments.pop(0) if arguments else "")
    match = AWK.match(arguments[0]) if len(arguments) == 1 else None
    if match is None or (separator is not None and len(separator) != 1):
        return None
    lines = []
    for line in text.rstrip("\n").split("\n"):
        parts = line.split(separator)
        number = len(parts) if match[2] or match[1] == "NF" else int(match[1])
        field = line if number == 0 else parts[number - 1] if number <= len(parts) else ""
        lines.append(str(number) if match[2] else field)
    return "\n".join(lines)


def _ends(argv: Sequence[str], text: str, *, last: bool) -> str | None:
    match = re.fullmatch(r"(?:-n\s?|-)(\d{1,4})|", " ".join(argv))
    lines, count = text.rstrip("\n").split("\n"), int(match[1] or 10) if match else 0
    return match and "\n".join(lines[-count:] if last else lines[:count])


def _wc(argv: Sequence[str], text: str) -> str | None:
    """
    >>> _wc(["-l"], "0,1".replace(",", chr(10))), _wc(["-w"], "a b c")
    ('2', '3')
    """
    if list(argv) == ["-l"]:
        return str(len(text.rstrip("\n").split("\n")) if text.strip("\n") else 0)
    return str(len(text.split())) if list(argv) == ["-w"] else None


def _seq(argv: Sequence[str], _: str) -> str | None:
    """
    >>> _seq(["16", "8", "32"], "").split(), _seq(["3"], "").split()
    (['16', '24', '32'], ['1', '2', '3'])
    """
    if not 1 <= len(argv) <= 3 or not all(re.fullmatch(r"-?\d{1,9}", text) for text in argv):
        return None
    first, *steps, last = map(int, argv if len(argv) > 1 else ["1", *argv])
    step = steps[0] if steps else 1
    if step == 0 or abs(last - first) // abs(step) > MAX_LINES:
        return None
    return "\n".join(map(str, range(first, last + (1 if step > 0 else -1), step)))


def _basename(argv: Sequence[str], _: str) -> str | None:
    if not argv or argv[0].startswith("-"):
        return None
    return os.path.basename(argv[0].rstrip("/")).removesuffix("".join(argv[1:]))


def _expr(argv: Sequence[str], _: str) -> str | None:
    if not all(EXPRESSION.fullmatch(text) for text in argv):
        return None
    try:
        return str(ShellExpression(" ".join(argv), int, lambda name, value: None).result())
    except ValueError:
        return None


WRITERS: dict[str, Callable[[Sequence[str], str], str | None]] = {
    "echo": lambda argv, _: " ".join(text for text in argv if not text.startswith("-")),
    "dirname": lambda argv, _: (os.path.dirname(argv[-1]) or ".") if argv else None,
    "basename": _basename, "expr": _expr, "seq": _seq,
}  # fmt: skip
"""Programs whose output depends only on their words. They return None for words that are not supported."""
FILTERS: dict[str, Callable[[Sequence[str], str], str | None]] = {
    **WRITERS, "tr": _tr, "cut": _cut, "sed": _sed, "awk": _awk, "head": partial(_ends, last=False),
    "tail": partial(_ends, last=True), "wc": _wc, "cat": lambda argv, text: None if argv else text,
}  # fmt: skip
"""Programs whose output depends only on their words and their stdin."""


def formatted(argv: list[Field], place: Place) -> Field:
    """The output of printf with %s, %d and %q. The format is repeated if there are more values than places."""
    if not argv:
        return Field("", place)
    full = joined(argv, place)
    template = argv[0].text.replace("\\n", "\n").replace("\\t", "\t")
    pieces = re.split(r"%[sdq]", template)
    if full.unknown or "%" in "".join(pieces).replace("%%", ""):
        return Field(template, place, full.unknown or f"the printf of {place} is not read")
    places, values, text = re.findall(r"%[sdq]", template), [word.text for word in argv[1:]], ""
    while True:
        for piece, letter in zip(pieces, [*places, ""], strict=True):
            value = values.pop(0) if letter and values else ""
            text += piece + (shlex.quote(value) if letter == "%q" else value)
        if not values or not places:
            return Field(checked(text, place).replace("%%", "%"), place)


RUNNERS = ("bash", "sh", "sbatch", "qsub", "bsub", "ssh", "tmux", "screen")
"""Commands that run a text that they are given."""
SHELLS = ("bash", "sh", "zsh", "dash")
QUEUES = ("sbatch", "qsub", "bsub")
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".job")
"""Suffixes of the names of scripts."""
STARTERS = (
    "nohup", "exec", "time", "env", "sudo", "srun", "stdbuf", "numactl", "setsid", "timeout", "nice", "ray", "docker",
    "podman", "apptainer", "singularity", "mpirun", "ssh",
)  # fmt: skip
"""Commands that start a program given among their arguments."""
ENDS_IN_BLANK = re.compile(r"\\[ \t]+$")


def interruption(line: str) -> str:
    """Return why a command does not continue after a line.

    >>> interruption("  --lr 1e-6"), interruption("  # --lr 1e-6 \\\\")
    ('the line ends without a backslash', 'the line is a comment')
    """
    if ENDS_IN_BLANK.search(line):
        return "a blank follows the backslash of the line"
    if not line.strip():
        return "the line is empty"
    if line.lstrip().startswith("#"):
        return "the line is a comment"
    return "the backslash of the line is in a comment" if re.search(r"\s#.*\\$", line) else (
        "the line ends without a backslash"
    )  # fmt: skip


def inner_script(fields: Sequence[Field]) -> Field | None:
    """The script of `bash -c TEXT`, which another command may start (`srun`, `docker run`), or of `ssh HOST TEXT`,
    `sbatch --wrap TEXT` and `tmux … TEXT`, or None for other commands.
    """
    for shell, option, text in zip(fields, fields[1:], fields[2:], strict=False):
        name = os.path.basename(shell.text)
        if name in SHELLS and re.fullmatch(r"-[a-z]*c", option.text):
            return text
    last = fields[-1]
    if fields[0].text in RUNNERS and len(fields) > 1 and re.search(r"\s", last.text):
        return last.with_text(last.text.removeprefix("--wrap="))
    return None


def script_file(fields: Sequence[Field]) -> int | None:
    """The position of FILE in `bash [-OPTIONS] FILE`, `sbatch FILE` or `./FILE`, which another command may start.

    None for other commands.
    """
    for position, field in enumerate(fields):
        if os.path.basename(field.text) in QUEUES:
            words = range(position + 1, len(fields))
            return next((number for number in words if fields[number].text.endswith(SCRIPTS)), None)
        if os.path.basename(field.text) in SHELLS:
            return _first_argument(fields, position + 1)
        if field.text.endswith(SCRIPTS) and (not position or os.path.basename(fields[0].text) in STARTERS):
            return position
    return None


def _first_argument(fields: Sequence[Field], start: int) -> int | None:
    """The position of the first argument after the options, if it is a script."""
    position = start
    while position < len(fields) and fields[position].text[:1] in ("-", "+"):
        position += 2 if re.fullmatch(r"[-+][a-z]*[oO]", fields[position].text) else 1
    is_script = position < len(fields) and fields[position].text.endswith(SCRIPTS)
    return position if is_script else None
