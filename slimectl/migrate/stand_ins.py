"""Imports of `slime`: stand-ins for its modules, and an installed slime for modules and names without one."""

from __future__ import annotations

import dis
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

SWITCH = "SLIMECTL_SLIME"
"""Environment variable: `adapter` (the default) or `installed`. Worker processes inherit it."""
IMPORT_PATH = Path(__file__).parent / "import_path"
"""Folder that an installation puts at the end of `sys.path`. Its package `slime` installs the finder."""

_TABLE = """
slime.agent.adapters                          agents        AnthropicAdapter BaseAdapter OpenAIAdapter
slime.agent.adapters.anthropic                agents        AnthropicAdapter
slime.agent.adapters.common                   agents        BaseAdapter
slime.agent.adapters.openai                   agents        OpenAIAdapter
slime.agent.aiohttp_threaded                  agents        FilteredAccessLogger run_app_in_thread
slime.agent.harness                           absent        CLAUDE_CODE CODEX
slime.agent.sandbox                           absent        E2BSandbox Sandbox ensure_agent_user
slime.data                                    data          RolloutDataSource RolloutDataSourceWithBuffer Sample
slime.backends.megatron_utils.cp_utils        losses        all_gather_with_cp get_sum_of_sample_mean
slime.backends.megatron_utils.cp_utils        losses        slice_log_prob_with_cp slice_with_cp
slime.backends.megatron_utils.loss            losses        get_log_probs_and_entropy
slime.ray.rollout                             metrics       compute_metrics_from_samples
slime.ray.rollout                             metrics       compute_perf_metrics_from_samples
slime.rollout.base_types                      results       RolloutFnEvalOutput RolloutFnTrainOutput call_rollout_fn
slime.rollout.data_source                     data          DataSource RolloutDataSource RolloutDataSourceWithBuffer
slime.rollout.data_source                     data          pop_first
slime.rollout.filter_hub.base_types           results       DynamicFilterOutput MetricGatherer call_dynamic_filter
slime.rollout.filter_hub.base_types           results       should_drop_dynamic_filter_output
slime.rollout.filter_hub.dynamic_sampling_filters  results  check_reward_nonzero_std
slime.rollout.filter_hub.dynamic_sampling_filters  results  check_reward_nonzero_std_with_fallback
slime.rollout.on_policy_distillation          absent        post_process_rewards reward_func
slime.rollout.on_policy_distillation          absent        post_process_rewards_cross_vocab reward_func_cross_vocab
slime.rollout.rm_hub                          grading       async_rm batched_async_rm remote_rm
slime.rollout.rm_hub                          graders       compute_gpqa_reward compute_score_dapo extract_boxed_answer
slime.rollout.rm_hub                          graders       f1_score get_deepscaler_rule_based_reward grade_answer_verl
slime.rollout.rm_hub.deepscaler               graders       get_deepscaler_rule_based_reward
slime.rollout.rm_hub.f1                       graders       f1_score normalize_answer
slime.rollout.rm_hub.gpqa                     graders       compute_gpqa_reward
slime.rollout.rm_hub.ifbench                  graders       compute_ifbench_reward
slime.rollout.rm_hub.math_dapo_utils          graders       compute_score last_boxed_only_string normalize_final_answer
slime.rollout.rm_hub.math_dapo_utils          graders       remove_boxed
slime.rollout.rm_hub.math_utils               graders       extract_answer extract_boxed_answer grade_answer_mathd
slime.rollout.rm_hub.math_utils               graders       grade_answer_sympy grade_answer_verl last_boxed_only_string
slime.rollout.rm_hub.math_utils               graders       remove_boxed
slime.rollout.sft_rollout                     absent        generate_rollout
slime.rollout.sglang_rollout                  generation    GenerateState generate generate_and_rm
slime.rollout.sglang_rollout                  generation    generate_and_rm_group generate_rollout
slime.rollout.sglang_rollout                  generation    generate_rollout_async generate_turn get_model_url
slime.rollout.sglang_rollout                  absent        abort eval_rollout eval_rollout_single_dataset
slime.utils.arguments                         arguments     parse_args
slime.utils.async_utils                       requests      run
slime.utils.data                              data          Dataset filter_long_prompt
slime.utils.data                              data          get_minimum_num_micro_batch_size read_file
slime.utils.http_utils                        requests      find_available_port get get_host_info
slime.utils.http_utils                        requests      get_rollout_num_engines init_http_client
slime.utils.http_utils                        requests      is_port_available post
slime.utils.logging_utils        runtime.tracking_functions  configure_logger finish_tracking init_tracking log
slime.utils.mask_utils                        tokens        MultiTurnLossMaskGenerator get_response_lengths
slime.utils.metric_utils                      metrics       compression_ratio compute_pass_rate compute_rollout_step
slime.utils.metric_utils                      metrics       compute_statistics dict_add_prefix has_repetition
slime.utils.misc                              arguments     SingletonMeta load_function
slime.utils.misc                              metrics       should_run_periodic_action
slime.utils.misc                              requests      get_free_port
slime.utils.ppo_utils                         losses        calculate_log_probs_and_entropy compute_approx_kl
slime.utils.ppo_utils                         losses        compute_entropy_from_logits compute_gspo_kl
slime.utils.ppo_utils                         losses        compute_log_probs compute_policy_loss
slime.utils.ppo_utils                         losses        get_advantages_and_returns
slime.utils.ppo_utils                         losses        get_advantages_and_returns_batch get_grpo_returns
slime.utils.ppo_utils                         losses        get_reinforce_plus_plus_baseline_advantages
slime.utils.ppo_utils                         losses        get_reinforce_plus_plus_returns
slime.utils.processing_utils                  tokens        build_processor_kwargs encode_image_for_rollout_engine
slime.utils.processing_utils                  tokens        load_processor load_tokenizer process_vision_info
slime.utils.types                             results       MultimodalType MultimodalTypes RolloutBatch Sample
"""


def _read_table() -> dict[str, dict[str, str]]:
    """Return the modules of the table with their packages. Each lists the implementing module of every name."""
    modules: dict[str, dict[str, str]] = {}
    for line in _TABLE.strip().splitlines():
        module, implementation, *names = line.split()
        parts = module.split(".")
        for end in range(1, len(parts)):
            modules.setdefault(".".join(parts[:end]), {})
        package = "slimectl" if "." in implementation else "slimectl.migrate.slime"
        modules.setdefault(module, {}).update(dict.fromkeys(names, f"{package}.{implementation}"))
    return modules


STAND_INS = _read_table()
"""Module of slime -> its names -> the module of slimectl that implements them."""


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins before an installed slime, unless the environment variable `SLIMECTL_SLIME` is `installed`.

    Modules without a stand-in, and names that a stand-in lacks, come from an installed slime. If there is none, the
    error lists the available names.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "slime" and not name.startswith("slime."):
            return None
        is_adapter = _prefers_adapter()
        installed = self._find_installed(name, path)
        if is_adapter and name in STAND_INS:
            is_package = any(module.startswith(f"{name}.") for module in STAND_INS)
            spec = importlib.machinery.ModuleSpec(name, self, is_package=is_package, loader_state=installed)
            if is_package and installed is not None:
                spec.submodule_search_locations = list(installed.submodule_search_locations or ())
            return spec
        if installed is None:
            raise ModuleNotFoundError(_absence(name, is_adapter), name=name)
        return installed

    def exec_module(self, module: ModuleType) -> None:
        names = STAND_INS[module.__name__]
        attributes: dict[str, Any] = {"__all__": sorted(names), "__getattr__": _Attributes(module), "__dir__": None}
        attributes["__dir__"] = lambda: sorted({*vars(module), *names})
        vars(module).update(attributes)

    def _find_installed(self, name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec from the other finders. The folder of `IMPORT_PATH` does not count."""
        search_path = [folder for folder in (sys.path if path is None else path) if not _is_ours(folder)]
        for finder in sys.meta_path:
            if isinstance(finder, StandInFinder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, search_path)
            if spec is not None and not (spec.origin and _is_ours(spec.origin)):
                return spec
        return None


class _Attributes:
    """Looks up the attributes of one stand-in module when they are first used."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._installed: ModuleType | None = None

    def __call__(self, name: str) -> Any:
        module, names = self._module, STAND_INS[self._module.__name__]
        if name in names:
            value = getattr(importlib.import_module(names[name]), name)
        elif name.startswith("__") or f"{module.__name__}.{name}" in STAND_INS:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        else:
            try:
                value = self._installed_value(name)
            except ImportError as error:
                # Libraries look up names in every loaded module, and expect no other error than this.
                if _is_import_from(sys._getframe(1)):
                    raise
                raise AttributeError(str(error)) from error
        setattr(module, name, value)
        return value

    def _installed_value(self, name: str) -> Any:
        """Return the value from slime. Raises ImportError if it is missing, AttributeError if it lacks the name."""
        spec = self._module.__spec__
        installed = None if spec is None else spec.loader_state
        if installed is None or installed.loader is None:
            available = ", ".join(self._module.__all__)
            raise ImportError(
                f"slimectl has no stand-in for {self._module.__name__}.{name}. This module has "
                f"{available or 'submodules only'}. Remove the import, or install slime alongside slimectl.",
                name=self._module.__name__,
            )
        if self._installed is None:
            self._installed = importlib.util.module_from_spec(installed)
            installed.loader.exec_module(self._installed)
        return getattr(self._installed, name)


def _is_import_from(frame: FrameType) -> bool:
    """Return whether the frame is at the instruction of `from … import`."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def _is_ours(path: str) -> bool:
    return Path(path).is_relative_to(IMPORT_PATH)


def _prefers_adapter() -> bool:
    """Return whether stand-ins are preferred to an installed slime. Raises ImportError for an invalid switch."""
    value = os.environ.get(SWITCH) or "adapter"
    if value not in ("adapter", "installed"):
        raise ImportError(f"{SWITCH} = {value!r} is not a valid value. Set it to adapter or installed.")
    return value == "adapter"


def _absence(name: str, is_adapter: bool) -> str:
    if not is_adapter:
        return f"{name} is not installed, but {SWITCH} = installed requires it. Install slime, or unset {SWITCH}."
    parent, siblings = name, list[str]()
    while not siblings:
        parent = parent.rpartition(".")[0]
        siblings = [module for module, names in STAND_INS.items() if names and module.startswith(f"{parent}.")]
    return (
        f"slimectl has no stand-in for {name}. Available in {parent}: {', '.join(siblings)}. Remove it, or install "
        f"slime alongside slimectl, which then provides {name}."
    )


def install_stand_ins() -> None:
    """Make imports such as `from slime.utils.types import Sample` work in this process, even if slime is installed."""
    if not any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, StandInFinder())
