"""Recognizes the script that a command starts, and the line that ends a command too early."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from slimectl.settings.launch_scripts.shell_values import Field

RUNNERS = ("bash", "sh", "sbatch", "qsub", "bsub", "ssh", "tmux", "screen")
"""Commands that run a text which they are given."""
SHELLS = ("bash", "sh", "zsh", "dash")
QUEUES = ("sbatch", "qsub", "bsub")
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".job")
"""Ends of the names of scripts."""
STARTERS = (
    "nohup", "exec", "time", "env", "sudo", "srun", "stdbuf", "numactl", "setsid", "timeout", "nice", "ray", "docker",
    "podman", "apptainer", "singularity", "mpirun", "ssh",
)  # fmt: skip
"""Commands that start the program which is among their arguments."""
ENDS_IN_BLANK = re.compile(r"\\[ \t]+$")


def interruption(line: str) -> str:
    """Return why no command continues behind a line.

    >>> interruption("  --lr 1e-6"), interruption("  # --lr 1e-6 \\\\")
    ('the line ends without a backslash', 'the line is a comment')
    """
    if ENDS_IN_BLANK.search(line):
        return "a blank follows the backslash of the line"
    if not line.strip():
        return "the line is empty"
    if line.lstrip().startswith("#"):
        return "the line is a comment"
    return "the backslash of the line stands in a comment" if re.search(r"\s#.*\\$", line) else (
        "the line ends without a backslash"
    )  # fmt: skip


def inner_script(fields: Sequence[Field]) -> Field | None:
    """The script of `bash -c TEXT`, which another command may start (`srun`, `docker run`), or of `ssh HOST TEXT`,
    `sbatch --wrap TEXT` and `tmux … TEXT`; None for other commands.
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
    """The position of the first argument, behind options, if it is a script."""
    position = start
    while position < len(fields) and fields[position].text[:1] in ("-", "+"):
        position += 2 if re.fullmatch(r"[-+][a-z]*[oO]", fields[position].text) else 1
    is_script = position < len(fields) and fields[position].text.endswith(SCRIPTS)
    return position if is_script else None
