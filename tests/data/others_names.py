"""Every metric of slime and of ROLL: emitted by the runs of test_metrics_catalogue.py, or absent for a reason.

A part in braces with commas stands for each of its words; another one for any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

NO_GPU = "needs a GPU: by hand in tests/stages/test_round_timer.py"
EVEN = "no setting weighs whole samples: all of a step count as the reduction of its algorithm says"

SLIME = {
    "train/{loss,pg_loss,value_loss,entropy_loss,pg_clipfrac,clipfrac,ppo_kl,kl_loss,kl,grad_norm,lr}": "",
    "train/{train_rollout_logprob_abs_diff,tis,tis_clipfrac,ois,opsm_clipfrac,opd_reverse_kl,value_clipfrac}": "",
    "train/{global_batch_size,step}": "",
    "train/critic-{loss,value_loss,value_clipfrac,grad_norm,lr}": "",
    "rollout/{avg_reward,max_reward,min_reward,raw_reward,rewards,advantages,returns,values,log_probs}": "",
    "rollout/{ref_log_probs,rollout_log_probs,entropy,kl,avg_response_length,truncation_rate,truncated_ratio}": "",
    "rollout/response_len/{mean,median,max,min}": "",
    "rollout/{repetition_frac,generation_time,samples_per_second,prefix_cache_hit_rate,step}": "",
    "rollout/zero_std/count_{reward}": "",
    "rollout/dynamic_filter/drop_{reason}": "",
    "rollout/error/{category}": "",
    "rollout/{spec_accept_rate,spec_accept_length,staleness/mean,staleness/max}": "",
    "eval/{small,small_avg_reward,small_accuracy,small-truncated_ratio,small-pass@4,small-avg@4,small-maj@4,step}": "",
    "eval/small/response_len/{mean,median,max,min}": "",
    "passrate/pass@{k}": "",
    "multi_turn/{raw_response_length,wo_obs_response_length,round_number}/{mean,max,min}": "",
    "perf/{train_time,rollout_time,total_time,wait_time_ratio,tokens_per_gpu_per_sec}": "",
    "perf/{longest_sample_tokens_per_sec,actor_train_tflops,log_probs_tflops,actor_train_tok_per_s}": "",
    "perf/{log_probs_time,ref_log_probs_time,actor_train_time,update_weights_time,save_model_time}": "",
    "perf/{data_preprocess_time,update_weights_bytes,mfu}": "",
    "perf/{gpu_memory_allocated_gb,gpu_memory_reserved_gb}": NO_GPU,
}

P = "{train_step,generate,model_update,compute_log_probs,do_checkpoint,compute_values,compute_rewards}"
SIZES = "{allocated,reserved,max_allocated,max_reserved}"
ROLL = {
    "{val/score,critic/score,critic/rewards,critic/advantages,critic/returns,critic/values}/{mean,max,min}": "",
    "critic/{ref_log_prob,old_log_prob,entropy}/mean": "",
    "critic/reward_clip_frac": "",
    "critic/{lr,loss,value,vpred,clipfrac,error}": "",
    "actor/{lr,ppo_ratio_high_clipfrac,ppo_ratio_low_clipfrac,ppo_ratio_clipfrac,ratio_mean,ratio_max,ratio_min}": "",
    "actor/{clipfrac,kl_loss,total_loss,approxkl,policykl,pg_loss,weighted_pg_loss}": "",
    "actor/{valid_samples,total_samples,valid_sample_ratio,sft_loss,positive_sft_loss,negative_sft_loss}": "",
    "actor/{sample_weights_mean,sample_weights_min,sample_weights_max}": EVEN,
    "tokens/{response_length,prompt_length}/{mean,max,min}": "",
    "system/{tps,samples}": "",
    "time/{rollout,ref_log_probs_values_reward,old_log_probs_values,adv}": "",
    f"time/{P}/{{total,execute,onload,offload}}": "",
    f"memory/{P}/{{start,end}}/{{offload,onload}}/{SIZES}/{{device}}": NO_GPU,
    f"memory/{P}/end/onload/{{max_allocated_frac,max_reserved_frac}}/{{device}}": NO_GPU,
    f"memory/cpu/{P}/{{start,end}}/{{rss,vms}}": "",
}

CHOICE = re.compile(r"\{[^{}]*,[^{}]*\}")


def names(pattern: str) -> Iterator[str]:
    """Every name that a pattern stands for.

    >>> list(names("a/{b,c}/{x}"))
    ['a/b/{x}', 'a/c/{x}']
    """
    pieces, choices = CHOICE.split(pattern), CHOICE.findall(pattern)
    for chosen in product(*(choice[1:-1].split(",") for choice in choices)):
        yield pieces[0] + "".join(word + piece for word, piece in zip(chosen, pieces[1:], strict=True))
