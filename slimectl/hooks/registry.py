"""Table of all hooks: their setting, accepted signatures and return value."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from slimectl.errors import HookError
from slimectl.hooks import signatures
from slimectl.migrate.slime_shapes import PARAMETERS
from slimectl.plugins.callables import Hook, complete_path, load_callable, parameter_names
from slimectl.settings import Settings


@dataclass(frozen=True)
class HookSpec:
    """One hook: its setting, accepted signatures and return value.

    `shapes` are the accepted signatures. The second applies if a callable has a parameter that only the second offers.
    """

    setting: str
    shapes: tuple[type, ...]
    returns: str

    @property
    def offers(self) -> tuple[str, ...]:
        """Parameter names of the first signature. `settings` is an alias of `args`."""
        return _names(self.shapes[0])

    def shape(self) -> str:
        """Describe the signature, as "called with …; returns …"."""
        alternatives = "".join(f"; or {', '.join(self._additional_names(shape))} instead" for shape in self.shapes[1:])
        return f"called with {', '.join(self.offers)}{alternatives}; returns {self.returns}"

    def alternatives(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return, for each further signature, its own parameters and the ones of the first that they replace."""
        return [
            (self._additional_names(shape), tuple(name for name in self.offers if name not in _names(shape)))
            for shape in self.shapes[1:]
        ]

    def load(
        self,
        path: str,
        *,
        setting: str | None = None,
        function: Callable[..., Any] | None = None,
        batched: bool = False,
    ) -> Hook:
        """Load the callable at `path`, unless it is given. Raises HookError if its parameters do not fit.

        If the path has no function name, a function with a customary name is used. With `batched`, names of functions
        of many samples are tried first. `setting` is the name in errors if the path comes from a different setting.
        """
        first = self.shapes[0]
        setting = setting or self.setting
        if function is None:
            groups = CUSTOMARY_NAMES[self.setting]
            path = complete_path(path, setting=setting, names=groups[::-1] if batched else groups)
        if first is signatures.DataSource:
            return self._load_class(path)
        function = load_callable(path, setting=setting) if function is None else function
        names = parameter_names(function, location=f"{setting}: {path}")
        shape = next((shape for shape in self.shapes[1:] if names & set(self._additional_names(shape))), first)
        return Hook(
            path,
            function=function,
            setting=setting,
            offers=_names(shape),
            other_names=PARAMETERS.get(self.setting, {}),
            takes_data=any(p.kind is p.VAR_KEYWORD for p in inspect.signature(shape.__call__).parameters.values()),
        )

    def _additional_names(self, shape: type) -> tuple[str, ...]:
        return tuple(name for name in _names(shape) if name not in self.offers)

    def _load_class(self, path: str) -> Hook:
        """Load a class whose instances are sources of groups."""
        data_source = Hook(path, setting=self.setting, offers=self.offers)
        if not callable(getattr(data_source.function, "get_samples", None)):
            raise HookError(f"{self.setting}: {path} has no get_samples. Give a class with this method")
        return data_source


def _names(shape: type) -> tuple[str, ...]:
    call = shape.__init__ if shape is signatures.DataSource else shape.__call__
    parameters = inspect.signature(call).parameters.values()
    names = [p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    aliased = [
        name for parameter in names for name in ((parameter, "settings") if parameter == "args" else (parameter,))
    ]
    return tuple(aliased)


RETURNS_NONE = "None"
HOOKS: dict[str, HookSpec] = {
    setting: HookSpec(setting, tuple(kinds), returns)
    for setting, kinds, returns in (
        ("rollout.function_path", [signatures.RolloutFunction], "groups of samples, or (groups, metrics)"),
        (
            "rollout.data_source_path",
            [signatures.DataSource],
            "a data source: get_samples; optionally add_samples, save, load, len",
        ),
        (
            "rollout.custom_generate_function_path",
            [signatures.GenerateFunction, signatures.GroupGenerateFunction],
            "the Sample or a list of them",
        ),
        ("rollout.sample_hook_path", [signatures.SampleHook], "a Sample or None"),
        ("rollout.dynamic_sampling_filter_path", [signatures.DynamicFilter], "True, False or (False, 'the reason')"),
        ("rollout.buffer_filter_path", [signatures.BufferFilter], "a list of groups"),
        ("rollout.all_samples_process_path", [signatures.AllSamplesProcess], RETURNS_NONE),
        ("rollout.sample_filter_path", [signatures.SampleFilter], f"{RETURNS_NONE}; it sets remove_sample"),
        (
            "rollout.data_postprocess_path",
            [signatures.DataPostprocess, signatures.GroupPostprocess],
            f"{RETURNS_NONE}; it changes rollout_data, or the loss masks of samples",
        ),
        (
            "score.custom_rm_path",
            [
                signatures.RewardFunction,
                signatures.BatchRewardFunction,
                signatures.ColumnRewardFunction,
                signatures.NamedRewardFunction,
            ],
            "a number or a dict of them; a list of those for samples and completions",
        ),
        (
            "score.custom_reward_post_process_path",
            [signatures.RewardPostProcess],
            "(raw_rewards, rewards), one number per sample in each",
        ),
        ("train.custom_convert_samples_to_train_data_path", [signatures.ConvertSamples], "a dict of lists"),
        (
            "train.custom_advantage_function_path",
            [signatures.AdvantageFunction],
            f'{RETURNS_NONE}; it writes rollout_data["advantages"]',
        ),
        ("train.custom_loss_function_path", [signatures.LossFunction], "(a scalar tensor, a dict of them)"),
        (
            "train.custom_tis_function_path",
            [signatures.ImportanceSampling],
            "(pg_loss, loss_masks, a dict of metrics)",
        ),
        ("train.custom_pg_loss_reducer_function_path", [signatures.LossReducer], "a callable: tensor [T] to scalar"),
        (
            "megatron.custom_model_provider_path",
            [signatures.ModelProvider],
            "the model: what build() makes, or a GPTModel of your own",
        ),
        ("megatron.custom_init_path", [signatures.MegatronInit], RETURNS_NONE),
        ("megatron.custom_before_log_prob_hook_path", [signatures.BeforeLogProb], RETURNS_NONE),
        ("megatron.custom_before_train_step_hook_path", [signatures.BeforeTrainStep], RETURNS_NONE),
        ("sync.custom_post_write_path", [signatures.PostWrite], RETURNS_NONE),
        ("track.custom_rollout_log_function_path", [signatures.RolloutLog], "True to skip the default log, else False"),
        (
            "track.custom_eval_rollout_log_function_path",
            [signatures.EvalLog],
            "True to skip the default log, else False",
        ),
    )
}
"""All hooks by setting."""


CUSTOMARY_NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    setting: tuple(tuple(group.split()) for group in groups)
    for setting, groups in {
        "rollout.function_path": ["generate_rollout generate rollout"],
        "rollout.data_source_path": ["DataSource RolloutDataSource RolloutDataSourceWithBuffer CustomDataSource"],
        "rollout.custom_generate_function_path": ["custom_generate generate"],
        "rollout.sample_hook_path": ["sample_hook"],
        "rollout.dynamic_sampling_filter_path": ["dynamic_sampling_filter dynamic_filter check_reward_nonzero_std"],
        "rollout.buffer_filter_path": ["buffer_filter pop_first"],
        "rollout.all_samples_process_path": ["all_samples_process process_all_samples"],
        "rollout.sample_filter_path": ["sample_filter filter_samples"],
        "rollout.data_postprocess_path": ["data_postprocess rollout_data_postprocess"],
        "score.custom_rm_path": [
            "reward_func custom_rm compute_reward compute_score reward_function reward_fn reward",
            "batched_custom_rm batched_reward_func batch_reward_func compute_rewards",
        ],
        "score.custom_reward_post_process_path": [
            "custom_reward_post_process reward_post_process post_process_rewards"
        ],
        "train.custom_convert_samples_to_train_data_path": [
            "convert_samples_to_train_data custom_convert_samples_to_train_data"
        ],
        "train.custom_advantage_function_path": ["custom_advantage custom_advantage_function compute_advantages"],
        "train.custom_loss_function_path": ["custom_loss custom_loss_function loss_function"],
        "train.custom_tis_function_path": ["custom_tis custom_tis_function tis_function"],
        "train.custom_pg_loss_reducer_function_path": ["get_pg_loss_reducer custom_pg_loss_reducer"],
        "megatron.custom_model_provider_path": ["custom_model_provider model_provider"],
        "megatron.custom_init_path": ["custom_init megatron_init"],
        "megatron.custom_before_log_prob_hook_path": ["before_log_prob custom_before_log_prob_hook"],
        "megatron.custom_before_train_step_hook_path": ["before_train_step custom_before_train_step_hook"],
        "sync.custom_post_write_path": ["custom_post_write post_write"],
        "track.custom_rollout_log_function_path": ["log_rollout_data"],
        "track.custom_eval_rollout_log_function_path": ["log_eval_rollout_data"],
    }.items()
}
"""Customary function names, by setting, for a path to a file or module without a function name.

Earlier strings are tried first. The file may have only one of the names within one string.
"""


def hooks(settings: Settings, setting: str) -> list[Hook]:
    """Load and check the callables that a setting names. Raises HookError."""
    batched = settings.score.group_rm
    return [_load_cached(setting, path, batched, os.getcwd()) for path in _paths(settings, setting)]


@cache
def _load_cached(setting: str, path: str, batched: bool, folder: str) -> Hook:
    return HOOKS[setting].load(path, batched=batched)


def is_set(settings: Settings, setting: str) -> bool:
    """Return whether a setting names a callable."""
    return bool(_paths(settings, setting))


def _paths(settings: Settings, setting: str) -> list[str]:
    section, _, key = setting.partition(".")
    value = getattr(getattr(settings, section), key)
    return value if isinstance(value, list) else [] if value is None else [value]


def hook(settings: Settings, setting: str) -> Hook | None:
    """Return the callable of a setting that has at most one, or None if it is not set."""
    callables = hooks(settings, setting)
    return callables[0] if callables else None


def required_hook(settings: Settings, setting: str) -> Hook:
    """Return the callable of a setting that is set."""
    function = hook(settings, setting)
    assert function is not None
    return function


def check_hooks(settings: Settings, *prefixes: str) -> None:
    """Load every callable of the settings with these prefixes (default: all), before any model is loaded.

    Raises HookError for a callable that does not exist or does not fit.
    """
    for setting in HOOKS:
        if not prefixes or setting.startswith(prefixes):
            for function in hooks(settings, setting):
                if HOOKS[setting].shapes[0] is signatures.DataSource:
                    _check_data_source(function, settings)


def _check_data_source(source: Hook, settings: Settings) -> None:
    """Raise HookError if a data source lacks a method that the settings do not replace."""
    if not hasattr(source.function, "__len__") and not settings.run.num_rollout:
        raise HookError(f"{source.name} has no __len__, so its epochs cannot be counted. Set run.num_rollout")
    if "dataset" in source.required and not settings.rollout.data:
        raise HookError(f"{source.name} asks for dataset, and rollout.data is empty. Set it, or add --data FILE")


TRAINING_HOOKS = ("train.", "megatron.", "rollout.sample_filter", "rollout.data_post", "score.custom_reward_post")
"""Prefixes of the settings whose hooks are called on training samples."""
