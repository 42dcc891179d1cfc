"""The stacks whose launch files are read, by name."""

from __future__ import annotations

from slimectl.settings.launch_scripts.conversion import Dialect
from slimectl.settings.launch_scripts.openrlhf import OPENRLHF
from slimectl.settings.launch_scripts.roll import ROLL
from slimectl.settings.launch_scripts.slime import SLIME
from slimectl.settings.launch_scripts.trl import TRL
from slimectl.settings.launch_scripts.verl import VERL

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (SLIME, VERL, TRL, OPENRLHF, ROLL)}
