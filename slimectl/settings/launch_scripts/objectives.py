"""Flags of other algorithms, which are refused, and programs that are not of a stack."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slimectl.errors import SettingsError
from slimectl.settings.launch_scripts.conversion import Conversion, Omission, is_on
from slimectl.settings.launch_scripts.foreign import absent_algorithm

ANY = ""
"""Stands for every value of a switch that is on."""
ALGORITHMS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "slime": {"opd_type": ("self", "sdft")},
    "roll": {"opsd_mode": (ANY, "sdft")},
    "openrlhf": {"pretrain_mode": (ANY, "pretrain")},
    "verl": {"algorithm.filter_sample.enable": (ANY, "gfpo")},
}
"""Flags of another algorithm by stack: the value that switches it on, and its name."""
PROGRAMS: Mapping[str, str] = {
    "verl": r"verl|((.*/)?verl[./])?(trainer|experimental)[./].*|(.*[./])?recipe[./](dapo|\w+_policy)[./].*|"
    r"(main|\w*sft)_\w+\.py",
}
"""Patterns of the programs whose flags say all that they do. Others bring an agent or a loss of their own."""


def refuse_other_algorithms(conversion: Conversion) -> None:
    """Raise SettingsError for a flag that switches another algorithm on."""
    for name, (value, algorithm) in ALGORITHMS.get(conversion.dialect.name, {}).items():
        flag = conversion.flags.get(name)
        if flag is not None and is_on(flag) and value in (ANY, conversion.text(name)):
            raise SettingsError(f"{flag.place}: {flag} {absent_algorithm(algorithm)}")


def ask_for_program(conversion: Conversion) -> None:
    """List the program first if it is not one of the stack."""
    pattern, launcher = PROGRAMS.get(conversion.dialect.name), conversion.flags.get("launcher")
    if pattern and launcher and not re.fullmatch(pattern, launcher.texts[0]):
        title = conversion.dialect.title
        reason = f"is no program of {title} and is not read. Set what it changes by hand: reward, rollout, loss"
        item = Omission(launcher.texts[0], str(launcher.place), reason, by_hand=True, first=True)
        conversion.omissions.insert(0, item)
