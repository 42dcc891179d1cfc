"""RL post-training of language models as composable stages, from the command line and from Python.

>>> from slimectl import load_settings, run
>>> settings = load_settings("quickstart", {"run.num_rollout": 20})
>>> for report in run(settings):                                                            # doctest: +SKIP
...     print(report.step, report.metrics["rollout/raw_reward"])

Names are imported at first use. `__init__.pyi` has their types. See docs/python.md.
"""

from importlib import import_module

__version__ = "0.2.0"

_MODULES = {
    "Prompt": "slimectl.types",
    "Sample": "slimectl.types",
    "Sampler": "slimectl.runtime.model_functions",
    "Settings": "slimectl.settings",
    "SlimectlError": "slimectl.errors",
    "StepReport": "slimectl.types",
    "Trainer": "slimectl.runtime.model_functions",
    "convert": "slimectl.runtime.model_functions",
    "create_model": "slimectl.runtime.model_functions",
    "evaluate": "slimectl.runtime.stage_functions",
    "load_settings": "slimectl.runtime.stage_functions",
    "prompts": "slimectl.runtime.stage_functions",
    "rollout": "slimectl.runtime.stage_functions",
    "run": "slimectl.runtime.stage_functions",
    "score": "slimectl.runtime.stage_functions",
    "train": "slimectl.runtime.stage_functions",
}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> object:
    """Import a public name at its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
