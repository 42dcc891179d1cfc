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
    "Sampler": "slimectl.api.models",
    "Settings": "slimectl.settings",
    "SlimectlError": "slimectl.errors",
    "StepReport": "slimectl.types",
    "Trainer": "slimectl.api.models",
    "convert": "slimectl.api.models",
    "create_model": "slimectl.api.models",
    "evaluate": "slimectl.api.stages",
    "load_settings": "slimectl.api.stages",
    "prompts": "slimectl.api.stages",
    "rollout": "slimectl.api.stages",
    "run": "slimectl.api.stages",
    "score": "slimectl.api.stages",
    "train": "slimectl.api.stages",
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
