"""The catalogue of findings: each detector with its severity, and the texts that explain it."""

from __future__ import annotations

from slimectl.diagnosis import learning, policy, resources, responses
from slimectl.diagnosis.detector import Detector

WORST = "slimectl inspect {run} --sort reward --explain"
BEST = "slimectl inspect {run} --sort -reward"
LONGEST = "slimectl inspect {run} --sort -response_length"
DOCTOR = "slimectl doctor --engine -c {run}/run.toml --model {run}/latest"

LEARNING = (
    Detector(
        "no-signal", "error", learning.no_signal,
        "In most rounds some group has different rewards. `rollout/no_signal` is absent.",
        ("The verifier does not find the answer, or labels have another form",
         "The prompts are too hard or too easy for the model",
         "rollout.temperature is too low, so responses are equal"),
        ("Read why, and fix the verifier or the label column (rollout.label_key)",
         "Use prompts that the model solves sometimes, or raise rollout.n_samples_per_prompt",
         "Warm up on labels with sft_warmup.data"),
        (WORST,), patience=1, recovery=5,
    ),
    Detector(
        "vanishing-signal", "warning", learning.vanishing_signal,
        "Less than 90 % of the groups have equal rewards (`rollout/zero_std/count_…`).",
        ("Most prompts are too hard or too easy", "Responses to a prompt are nearly equal: low temperature or entropy"),
        ("Raise rollout.n_samples_per_prompt", "Set algorithm.drop_zero_std_groups = true with over-sampling",
         "Keep prompts between rollout.easy_threshold and hard_threshold"),
        (WORST,), patience=5,
    ),
    Detector(
        "all-solved", "warning", learning.all_solved,
        "Less than 90 % of the groups succeed completely.",
        ("The model has learned these prompts", "The reward is too lenient"),
        (learning.EASY, "Stop here: more rounds change little", "Set rollout.retire_after to drop solved prompts"),
        (BEST,), patience=5,
    ),
    Detector(
        "flat-reward", "warning", learning.flat_reward,
        "The mean reward rises within the first 60 rounds.",
        ("train.lr is too low", "Too few samples per round for the noise of the reward",
         "The reward depends on something that the policy cannot change"),
        ("Raise train.lr by a factor of 3", "Raise run.rollout_batch_size or rollout.n_samples_per_prompt"),
        (WORST,),
    ),
    Detector(
        "reward-collapse", "error", learning.reward_collapse,
        "The mean of three rounds stays above half of the best three.",
        ("The policy has left the region where its gradient is right: see grad_norm and KL",),
        ("Add algorithm.kl_loss_coef = 0.001", "Lower train.ppo_epochs, or raise train.global_batch_size"),
        (WORST,), patience=1, recovery=5,
    ),
    Detector(
        "evaluation-collapse", "error", learning.evaluation_collapse,
        "An accuracy stays above half of its best value, or returns at the next evaluation, or the mean reward holds.",
        ("The policy overfits the training reward",),
        ("Set run.save_best, and continue from `best`",),
        (WORST,), after="evaluation", patience=1, recovery=1,
    ),
    Detector(
        "gaming", "warning", learning.gaming,
        "An evaluation gains at least a quarter of what the training reward gains, within two standard errors.",
        ("The policy games the reward: it finds responses that score without being right",
         "The policy memorizes the training prompts", "The evaluation measures something else"),
        ("Read the best-rewarded responses, and close the gap in the reward",
         "Add algorithm.kl_loss_coef = 0.001, or stop at the best evaluation with run.early_stop_patience"),
        (BEST,), after="evaluation", patience=1, recovery=1,
    ),
    Detector(
        "flat-evaluation", "warning", learning.flat_evaluation,
        "Within 60 rounds, one of five later evaluations is better than the first.",
        ("The training prompts do not cover what the evaluation asks", "train.lr is too low",
         "The policy games the reward"),
        ("Compare prompts and templates of rollout.data and eval.data",
         "Raise train.lr by a factor of 3, if the training reward is flat too"),
        (WORST,), after="evaluation", patience=1, recovery=1,
    ),
    Detector(
        "advantages", "warning", learning.advantages,
        "Advantages have a mean near 0 and a deviation near 1 where the algorithm normalizes them.",
        ("Long responses get other rewards than short ones, so a mean over tokens is not 0",
         "A function of yours replaces the advantages"),
        ("Look at rollout/advantages and the lengths", "Set algorithm.normalize_advantages = true"),
        patience=5,
    ),
)  # fmt: skip

POLICY = (
    Detector(
        "diverging", "error", policy.diverging,
        "The gradient norm stays below 8 times its first values, or the reward rises.",
        ("train.lr is too high", "Importance ratios explode: samples are too old, or train.ppo_epochs is too high"),
        ("Restart from the last good checkpoint with train.lr divided by 10", "Add algorithm.kl_loss_coef = 0.001"),
        (WORST,),
    ),
    Detector(
        "entropy-collapse", "error", policy.entropy_collapse,
        "The entropy stays above a tenth of the first rounds' entropy, until the task is solved. It is never 0.",
        ("The policy repeats one response", "train.lr is too high", "rollout.temperature is below 1"),
        ("Set algorithm.entropy_coef = 0.001, or algorithm.name = \"dapo\" (a higher upper clip range)",
         "Lower train.lr", "Set rollout.temperature = 1"),
        (WORST,),
    ),
    Detector(
        "entropy-explosion", "error", policy.entropy_explosion,
        "The entropy stays below twice its first values, or the reward rises with it.",
        ("train.lr is too high", "algorithm.entropy_coef is too high", "Engine and trainer disagree"),
        ("Lower train.lr by a factor of 3", "Set algorithm.entropy_coef = 0", "Add algorithm.kl_loss_coef = 0.001"),
        (WORST,),
    ),
    Detector(
        "kl-growth", "warning", policy.kl_growth,
        "The KL divergence rises, then stays flat. A step moves the policy by less than 0.1.",
        ("train.lr or train.ppo_epochs is too high", "algorithm.kl_loss_coef is too low for the reward"),
        ("Lower train.lr by a factor of 3", "Raise algorithm.kl_loss_coef, or set it to 0.001",
         "Set train.ppo_epochs = 1"),
        (WORST,),
    ),
    Detector(
        "ratio-growth", "warning", policy.ratio_growth,
        "The largest ratio of a token stays below 10.",
        ("Too many steps per round (train.ppo_epochs, train.global_batch_size)", "train.lr is too high",
         "Samples are stale or come from another model"),
        ("Set train.ppo_epochs = 1, or raise train.global_batch_size", "Set algorithm.use_tis = true",
         "Lower train.lr"),
    ),
    Detector(
        "gradient-spikes", "warning", policy.gradient_spikes,
        "The gradient norm of a round stays within 10 times the median.",
        ("A few bad samples: very long, degenerate, or with extreme rewards", "train.lr is too high"),
        ("Read the samples of these rounds", "Lower train.clip_grad or train.lr", "Set algorithm.reward_clip"),
        (LONGEST,), patience=1, recovery=10,
    ),
    Detector(
        "clip-fraction", "warning", policy.clip_fraction,
        "0 to 0.2 (`train/pg_clipfrac`). It is 0 with one step per round.",
        ("Too many or too large steps per round", "The clip range is too narrow for the kind of ratio"),
        ("Lower train.lr or train.ppo_epochs", "Raise algorithm.eps_clip"),
    ),
    Detector(
        "learning-rate-zero", "error", policy.learning_rate_zero,
        "The learning rate is above 0 until the last step.",
        ("train.lr_decay_iters is shorter than the run",),
        ("Set train.lr", "Set train.lr_decay_iters to the number of steps, or train.min_lr above 0"),
        patience=2, recovery=1,
    ),
    Detector(
        "frozen", "error", policy.frozen,
        "In rounds with signal, a tenth of the first rounds' gradient norm is left, unless the entropy falls too.",
        ("train.freeze_params_name_list or only_train_params_name_list freezes most parameters, or all",
         "A function of yours returns a loss without gradient"),
        ("Remove the frozen names, and check with slimectl run --dry-run", "Check the loss with slimectl run --smoke"),
    ),
)  # fmt: skip

RESPONSES = (
    Detector(
        "length-growth", "warning", responses.length_growth,
        "Responses stay below 2.5 times the first rounds' length, or the reward rises with it.",
        ("Long responses are not punished, and the loss favours them", "The policy does not end its responses"),
        ("Add `overlong` or `length_penalty` to the reward (score.rm)",
         "Set algorithm.calculate_per_token_loss = true"),
        (LONGEST,),
    ),
    Detector(
        "length-shrinkage", "warning", responses.length_shrinkage,
        "Responses stay above half of the first rounds' length, or the reward rises.",
        ("The reward punishes length more than it pays for right answers", "The policy has collapsed to a short text"),
        ("Lower the weight of a length penalty", "Add algorithm.kl_loss_coef = 0.001"),
        ("slimectl inspect {run} --sort response_length",),
    ),
    Detector(
        "reward-follows-length", "warning", responses.reward_follows_length,
        "The correlation of reward and length within groups stays between -0.9 and 0.9.",
        ("The reward pays length, directly or through something that grows with it",),
        ("Remove the length from the reward, or lower its weight", "Add a verifier of the result to score.rm"),
        (LONGEST,), patience=5,
    ),
    Detector(
        "truncation", "warning", responses.truncation,
        "Less than half of the responses are truncated (`rollout/truncated_ratio`).",
        ("rollout.max_response_len is too short for the task", "The policy does not end its responses"),
        ("Add `overlong` to the reward", "Check the end tokens with slimectl chat"),
        (LONGEST,),
    ),
    Detector(
        "duplicates", "error", responses.duplicates,
        "Responses to one prompt differ, unless they are right and the entropy has fallen.",
        ("The policy has collapsed to one response", "rollout.temperature is too low"),
        ("Set rollout.temperature = 1", "Set algorithm.entropy_coef = 0.001", "Lower train.lr"),
        (WORST,),
    ),
    Detector(
        "repetition", "error", responses.repetition,
        "Less than half of the 4-grams of a response occurred before in it.",
        ("The policy loops", "The chat template or the end token is wrong", "rollout.temperature is too low"),
        ("Check template and end tokens with slimectl inspect --mask", "Set rollout.repetition_penalty = 1.05",
         "Lower train.lr"),
        (LONGEST,),
    ),
    Detector(
        "verifier-timeouts", "warning", responses.verifier_timeouts,
        "Grading stays within its time limits.",
        ("The machine is overloaded by score.workers", "The policy found responses that are slow to grade"),
        ("Lower score.workers to the number of cores", "Raise score.timeout_s"),
        ("slimectl inspect {run} --where \"reward == 0\" --explain",), patience=2,
    ),
    Detector(
        "verifier-errors", "warning", responses.verifier_errors,
        "Every sample gets a reward, and less than 10 % of the attempts fail.",
        ("A server or a program that attempts need does not answer", "The reward function returns None"),
        ("Read the errors in log.txt and in metadata.error of the samples", "Set score.none_reward = \"error\""),
        ("slimectl inspect {run} --where \"status == 'failed'\"",), patience=2,
    ),
    Detector(
        "component-dominates", "warning", responses.component_dominates,
        "Components of the reward rise together, and vary within a factor of 50.",
        ("The weights of the reward's parts are on different scales", "One part is easier to raise than the others"),
        ("Change the weights in score.rm", "Set algorithm.name = \"gdpo\", which normalizes each component"),
        (BEST,), patience=5,
    ),
)  # fmt: skip

RESOURCES = (
    Detector(
        "mismatch", "error", resources.mismatch,
        "Below 0.005 with the embedded engine in float32, 0.02 in 16 bits, and it does not grow.",
        ("New weights do not reach the engine", "Engine and trainer differ in temperature, precision or kernels",
         "The tokenizer or the template of the engine's model differs"),
        ("Find the cause with slimectl doctor", "Set algorithm.use_tis = true to correct for what remains"),
        (DOCTOR,), patience=2,
    ),
    Detector(
        "staleness", "warning", resources.staleness,
        "Samples are as old as run.async_level and sync.update_weights_interval make them, and the policy has moved by "
        "less than 0.2 nat per token since they were sampled.",
        ("Weights are not pushed", "Some responses take many rounds"),
        ("Lower run.async_level or sync.update_weights_interval", "Set run.max_staleness",
         "Set algorithm.use_tis = true"),
        patience=3,
    ),
    Detector(
        "waiting", "advice", resources.waiting,
        "Below 0.3 (`perf/wait_time_ratio`), or 0.85 if engine and trainer take turns in one process. Colocated "
        "engines always make training wait.",
        ("Generation is slower than training", "Grading is slow"),
        ("Add engines (--engines)", "Lower rollout.max_response_len"),
        patience=3,
    ),
    Detector(
        "slow-grader", "advice", resources.slow_grader,
        "Grading takes less than 40 % of a round.",
        ("The reward function waits, and is called for one sample at a time",),
        ("Make the reward function async, or raise score.concurrency", "Raise score.workers"),
        patience=1,
    ),
    Detector(
        "slow-log-probs", "advice", resources.slow_log_probs,
        "Passes for log-probabilities take less time than training.",
        ("Packs of the pass are small", "The teacher or reference is much larger than the policy"),
        ("Raise train.max_tokens_per_gpu", "Set algorithm.use_rollout_logprobs = true with algorithm.use_tis = true"),
        patience=1,
    ),
    Detector(
        "slow-push", "advice", resources.slow_push,
        "Sending weights takes less than 30 % of the time.",
        ("The transport is slow for the size of the model",),
        ("Choose a faster sync.transport, or raise sync.update_weights_interval",),
        patience=1,
    ),
    Detector(
        "checkpoints", "advice", resources.checkpoints,
        "Writing checkpoints takes less than 30 % of the time.",
        ("Checkpoints are written too often", "The disk is slow"),
        ("Raise run.save_interval", "Set run.async_save = true"),
        patience=1,
    ),
    Detector(
        "straggler", "advice", resources.straggler,
        "Ranks and engines take about the same time, and no response is much longer than the others.",
        ("Packs are uneven", "A GPU is slower or shared", "One response is much longer than the others"),
        ("Set train.balance_data = true", "Check the machine with slimectl doctor",
         "Set rollout.partial_rollout = true"),
        (LONGEST,),
    ),
    Detector(
        "memory", "warning", resources.memory,
        "Below 95 % of the memory.",
        ("Packs are large", "Processes keep memory"),
        ("Lower train.max_tokens_per_gpu", "Set train.gradient_checkpointing = true",
         "Estimate the parts with slimectl plan -c {run}/run.toml"),
    ),
    Detector(
        "disk", "warning", resources.disk,
        "The disk has room until the end of the run.",
        ("Checkpoints and samples fill the disk",),
        ("Lower run.keep_checkpoints", "Set run.keep_samples = false", "Move run.dir to another disk"),
        ("du -sh {run}/*",), patience=1,
    ),
    Detector(
        "low-utilization", "advice", resources.low_utilization,
        "`perf/mfu` stays above a quarter of what `slimectl plan` assumes.",
        ("Packs are small", "Ranks wait for each other or for the input"),
        ("Raise train.max_tokens_per_gpu", "Compare with slimectl plan -c {run}/run.toml",
         "Profile two rounds with run.profile"),
        patience=1,
    ),
)  # fmt: skip

OUT_OF_MEMORY = Detector(
    "out-of-memory", "warning", resources.out_of_memory,
    "Every pack fits into memory (`perf/pack_splits` is absent).",
    ("Packs are too large for the memory that is left", "Engine and trainer share a GPU"),
    ("Lower train.max_tokens_per_gpu, or set it to \"auto\"", "Set train.gradient_checkpointing = true",
     "Estimate the parts with slimectl plan -c {run}/run.toml"),
    patience=1, recovery=10,
)  # fmt: skip
STOPPED = Detector(
    "stopped", "error", resources.never,
    "The log of a run does not end with an error.",
    ("The message tells the cause",),
    ("Fix what the message names, then resume with slimectl run --resume {run}",),
    ("tail {run}/log.txt",),
)  # fmt: skip
"""An error that ended a run. It is in the log, not in the records."""

DETECTORS: tuple[Detector, ...] = (*LEARNING, *POLICY, *RESPONSES, *RESOURCES, OUT_OF_MEMORY, STOPPED)
