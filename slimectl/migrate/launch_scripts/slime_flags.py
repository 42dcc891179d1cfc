"""The table of slime's flags, with the setting for each, or the reason why it has none.

Hooks that were written for slime also read the settings through this table, for example `args.rollout_temperature`.
"""

from __future__ import annotations

from slimectl.migrate.launch_scripts.conversion import Row, namesakes, renamed, typed
from slimectl.migrate.launch_scripts.megatron import ARGUMENTS, SHAPE
from slimectl.migrate.launch_scripts.values import (
    LOSS,
    OFF,
    Always,
    addresses,
    choice,
    dataset_pairs,
    function_path,
    function_paths,
    image_column,
    json_object,
    layers,
    mib,
    off,
    on,
    positive,
    rounds,
    secret,
    share,
    texts,
    verifier,
)

GENERATE = "slime.rollout.sglang_rollout.generate_rollout"
SFT = "slime.rollout.sft_rollout.generate_rollout"
CHECKPOINT = "resume a run with `slimectl run --resume runs/NAME`. Set model.path to start from other weights"
DUMPS = "replay a saved step with `slimectl train SAMPLES`"
DEEPGEMM = "matrix products use torch kernels; train.dtype sets their precision"
CI = "a self-test of slime; `slimectl doctor` tests this program"
TEACHER_SERVER = (
    "belongs to a teacher that slime serves. Start one with `slimectl serve MODEL`: algorithm.opd_teacher_url"
)
OWNED = "slimectl starts the engines and sets this itself. See docs/clusters.md"

LAUNCH = (
    Row("train-backend", "train.backend", default="megatron"),
    Row("debug-rollout-only", text="use `slimectl rollout -c FILE` to only sample"),
    Row("debug-train-only", text="use `slimectl train SAMPLES -c FILE` to only train"),
    Row("load-debug-rollout-data load-debug-rollout-data-subsample load-forge-rollout-data", text=DUMPS),
)  # fmt: skip
CLUSTER = (
    *namesakes("cluster", "actor-num-nodes rollout-num-gpus-per-engine"),
    Row("actor-num-gpus-per-node", "cluster.actor_num_gpus_per_node", default=8),
    Row("rollout-num-gpus", "cluster.rollout_num_gpus", "0 starts only a router there: set engine.url", positive),
    Row("num-gpus-per-node rollout-num-gpus-per-node", "cluster.num_gpus_per_node"),
    Row("colocate", "cluster.colocate", "engines share all GPUs of the trainer", on),
    Row("offload offload-train", "cluster.offload_train", convert=on),
    Row("no-offload-train", "cluster.offload_train", "the opposite", off),
    Row("offload-rollout no-offload-rollout", text="with cluster.colocate, engines always free their memory"),
    Row("distributed-backend", text="train.device decides it: nccl on GPUs, gloo on CPUs"),
    Row("distributed-timeout-minutes", text="not a setting; sync.timeout_s limits a weight update"),
    Row("critic-num-nodes critic-num-gpus-per-node", text="the critic shares the trainer's GPUs"),
)  # fmt: skip
TRAINING = (
    Row("force-fp8-ue8m0-scale", text="scales of pushed fp8 weights are float32 numbers"),
    Row("offload-train-mode disable-weights-backuper", text="cluster.offload_train moves both to the CPU"),
    Row("post-self-attn-layernorm post-mlp-layernorm", text="config.json names the layers"),
    Row("qwen-gdn-backend", text="there is one implementation of linear attention"),
    Row("train-env-vars", text="export the variables before `slimectl run`; ranks inherit them"),
    Row("update-weight-mode", "sync.transport", "delta is a transport here; full is any other transport",
        choice("delta", full="auto")),
    Row("update-weight-transport", "sync.transport", "nccl is distributed, or tensor on shared GPUs",
        choice("disk", nccl="distributed")),
    Row("release-train", text="cluster.offload_train frees the trainer's memory while engines sample"),
    Row("update-weight-disk-dir update-weight-delta-dir", "sync.update_weight_disk_dir"),
    Row("update-weight-disk-keep-files", "sync.update_weight_disk_keep_files", convert=on),
    Row("update-weight-delta-encoding update-weight-encoding", "sync.update_weight_delta_encoding",
        convert=choice("xor overwrite")),
    Row("update-weight-delta-checksum", "sync.update_weight_delta_checksum", "blake3 becomes blake2b",
        choice("adler32", xxh3_128="xxh3-128", blake3="blake2b")),
    Row("custom-update-weight-post-write-path", "sync.custom_post_write_path", convert=function_path),
    Row("update-weight-local-checkpoint-dir", text="engines read weights from sync.update_weight_disk_dir"),
    Row("custom-model-provider-path", "megatron.custom_model_provider_path", convert=function_path),
    Row("recompute-loss-function log-probs-chunk-size", text="both are always computed in chunks that fit"),
    *namesakes("train", "only-train-params-name-list freeze-params-name-list", texts),
    Row("use-lora", text="train.lora_rank switches LoRA on"),
    *namesakes("train", "lora-rank lora-alpha lora-load"),
    *renamed("lora-learning-rate=train.lr lora-weight-decay=train.weight_decay "
             "fsdp-max-tokens-per-gpu=train.max_tokens_per_gpu"),
    Row("lora-target-modules", "train.lora_targets", "the last part of each module's Hugging Face name", layers),
    Row("lora-target-preset", text="set train.lora_targets to the names of the layers", neutral=OFF),
    Row("save-lora lora-save-merged-hf", text="checkpoints hold the adapter; `slimectl convert` merges it"),
    Row("lora-dropout", text="LoRA has no dropout here"),
    Row("freeze-indexer", text="set train.freeze_params_name_list to the names of the indexer"),
    Row("allgather-cp", text="there is one form of context parallelism. See docs/megatron.md"),
    Row("gradient-checkpointing", "train.gradient_checkpointing", convert=on),
    Row("true-on-policy-mode", text="the closest is float32 in train.dtype and engine.dtype"),
    Row("log-model-config", text="`slimectl plan -c FILE` prints the shape of the model"),
    Row("use-critic", text="only algorithm.name = ppo has a critic"),
    Row("bf16", "train.dtype", convert=Always("bfloat16"), default="bfloat16"),
    Row("fsdp-cpu-offload", "train.offload", convert=Always("parameters")),
    Row("fsdp-cpu-backend attn-implementation fsdp-state-dict-cpu-offload", text="train.device decides these"),
    Row("qkv-format", text="sequences are packed without padding (thd)"),
    Row("int4-params-rollout", text="weights are never pushed as int4. Use engine.dtype, or fp8 by engine.load"),
    Row("delta-compression delta-dtype delta-full-interval", text="see sync.update_weight_delta_encoding"),
    Row("fp16", text="train.dtype is bfloat16 or float32"),
)  # fmt: skip
ROLLOUT = (
    *renamed("hf-checkpoint=model.path over-sampling-batch-size=rollout.over_sampling_batch_size "
             "update-weights-interval=sync.update_weights_interval async-buffer-size=run.async_level"),
    Row("megatron-to-hf-mode", text="models are always Hugging Face directories"),
    Row("processor", text="the processor comes from model.path"),
    Row("model-name", text="config.json names the model family"),
    Row("rollout-function-path", "rollout.function_path", "slimectl replaces slime's own functions", function_path),
    *namesakes("rollout", "temperature top-p top-k max-context-len max-prompt-len max-response-len seed",
               flag="rollout-"),
    Row("rollout-skip-special-tokens", "rollout.skip_special_tokens", convert=on, default=False),
    *namesakes("rollout", "stop stop-token-ids", texts, flag="rollout-"),
    Row("rollout-shuffle", "rollout.shuffle", convert=on),
    Row("dynamic-sampling-filter-path", "rollout.dynamic_sampling_filter_path",
        "check_reward_nonzero_std becomes slimectl.stages.filters:nonzero_std", function_path),
    *namesakes("rollout", "partial-rollout mask-offpolicy-in-partial-rollout", on),
    *namesakes("rollout", "custom-generate-function-path buffer-filter-path", function_path),
    Row("rollout-sample-hook-path", "rollout.sample_hook_path", convert=function_paths),
    *namesakes("track", "custom-rollout-log-function-path custom-eval-rollout-log-function-path", function_path),
    Row("update-weight-buffer-size update-weights-bucket-size", "sync.update_weight_buffer_size", "bytes become MiB",
        mib),
    Row("keep-old-actor", text="old log-probabilities always use the weights before the steps of a round"),
    Row("rollout-data-postprocess-path", "rollout.data_postprocess_path", convert=function_path),
    Row("rollout-data-transport", text="the executor sends samples to the ranks"),
    Row("rollout-external-engine-addrs", "engine.url", "HOST:PORT becomes http://HOST:PORT", addresses),
    Row("flush-cache-interval", text="engines flush their cache at every weight update. See sync.pause_mode"),
    Row("buffer-sort-by-staleness", text="unfinished responses resume in the order of their prompts"),
    Row("rollout-data-dir rollout-storage-profile rollout-storage-declaration rollout-queue-NAME "
        "rollout-io-concurrency rollout-session-id rollout-cleanup-timeout",
        text="slimectl keeps no sample queue on disk. The executor sends samples to the ranks"),
    Row("max-turns", "custom.max_turns", "your function reads args.max_turns", typed),
)  # fmt: skip
FAULTS = (
    Row("use-fault-tolerance", "engine.use_fault_tolerance", convert=on, default=False),
    *namesakes("engine", "health-check-interval health-check-timeout health-check-first-wait", flag="rollout-"),
)  # fmt: skip
DATA = (
    Row("num-rollout", "run.num_rollout", "0 only evaluates there: use `slimectl eval`", rounds),
    *namesakes("run", "num-epoch rollout-batch-size"),
    Row("disable-rollout-global-dataset", text="set rollout.data_source_path to your own source"),
    Row("data-source-path", "rollout.data_source_path", convert=function_path),
    Row("prompt-data", "rollout.data", convert=texts),
    Row("apply-chat-template", "rollout.apply_chat_template", convert=on),
    Row("apply-chat-template-kwargs", "rollout.apply_chat_template_kwargs", "the JSON becomes a table", json_object),
    Row("input-key", "rollout.input_key", default="input"),
    *namesakes("rollout", "label-key metadata-key tool-key"),
    Row("multimodal-keys", "rollout.image_key", "the column of the images; videos are not read", image_column),
    Row("n-samples-per-prompt", "rollout.n_samples_per_prompt", default=1),
    *namesakes("train", "global-batch-size num-steps-per-rollout micro-batch-size max-tokens-per-gpu"),
    *namesakes("train", "balance-data use-dynamic-batch-size", on, default=False),
    Row("balance-by-flops", "train.balance_by_flops", convert=on),
    Row("log-probs-max-tokens-per-gpu", text="train.max_tokens_per_gpu limits every pass"),
)  # fmt: skip
EVALUATION = (
    Row("eval-function-path", text="set custom_generate_function_path in [eval.data.NAME]"),
    *namesakes("eval", "interval temperature top-p top-k max-response-len min-new-tokens", flag="eval-"),
    Row("eval-prompt-data", "eval.data", "NAME PATH pairs become a table; NAME is aime by default", dataset_pairs),
    Row("eval-config", text="pass the same file to `slimectl run --eval-config FILE`"),
    Row("skip-eval-before-train", "eval.before_train", "the opposite", off),
    Row("eval-input-key eval-label-key eval-tool-key", text="set input_key, label_key, tool_key in [eval.data.NAME]"),
    Row("n-samples-per-eval-prompt", "eval.n_samples_per_prompt"),
    Row("eval-max-prompt-len", text="rollout.max_prompt_len limits every prompt"),
    Row("eval-max-context-len", text="rollout.max_context_len limits every conversation"),
)  # fmt: skip
ALGORITHM = (
    Row("ref-load", "algorithm.ref_load", "must be a Hugging Face directory; without it the reference is model.path"),
    Row("ref-ckpt-step", text="convert that step with `slimectl convert` and set algorithm.ref_load"),
    Row("load ckpt-step start-rollout-id", text=CHECKPOINT),
    Row("save", "run.dir", "its parent becomes run.dir, its name run.name"),
    *namesakes("run", "save-interval seed"),
    Row("async-save", "run.async_save", convert=on),
    *namesakes("train", "no-save-optim no-load-optim reset-optimizer-states", on),
    Row("no-load-rng finetune", text="a new run starts with a new optimizer; --resume restores it"),
    Row("save-hf", text="checkpoints are Hugging Face directories already (megatron.save_format)"),
    *namesakes("train", "clip-grad lr lr-wsd-decay-iters lr-wsd-decay-style lr-warmup-iters lr-decay-iters min-lr "
               "adam-beta1 adam-eps"),
    *namesakes("algorithm", "calculate-per-token-loss normalize-advantages", on, default=False),
    Row("optimizer", "train.optimizer", "adam is adamw", choice("muon", adam="adamw")),
    *namesakes("train", "muon-momentum muon-num-ns-steps"),
    Row("muon-use-nesterov", "train.muon_use_nesterov", convert=on),
    Row("lr-decay-style", "train.lr_decay_style",
        convert=choice("constant linear cosine", inverse_square_root="inverse-square-root", wsd="WSD"),
        default="linear"),
    Row("lr-warmup-fraction", "train.lr_warmup_fraction", "rounded up to whole steps", share),
    Row("weight-decay", "train.weight_decay", default=0.01),
    Row("adam-beta2", "train.adam_beta2", default=0.999),
    *namesakes("algorithm", "num-critic-only-steps critic-lr critic-load eps-clip-high eps-clip-c value-clip kl-coef "
               "kl-loss-coef ref-update-interval entropy-coef gamma tis-clip-low opsm-delta"),
    Row("critic-save critic-lr-warmup-iters", text="the critic is saved with the policy, and its rate is constant"),
    Row("megatron-config-path", text="write its keys into [megatron] and [megatron.args]"),
    Row("eps-clip", "algorithm.eps_clip", default=0.2),
    Row("loss-type", "algorithm.name", "sft_loss is algorithm.name = sft",
        choice(policy_loss="grpo", sft_loss="sft", custom_loss="grpo", topk_opd_loss="opd")),
    *namesakes("train", "custom-loss-function-path custom-advantage-function-path custom-tis-function-path "
               "custom-pg-loss-reducer-function-path", function_path),
    Row("kl-loss-type", "algorithm.kl_loss_type", convert=choice("k1 k2 k3 low_var_kl"), default="k1"),
    Row("advantage-estimator", "algorithm.name", "on_policy_distillation is opd",
        choice("grpo gspo cispo ppo reinforce_plus_plus reinforce_plus_plus_baseline", on_policy_distillation="opd")),
    Row("disable-compute-advantages-and-returns", text="your own estimator is train.custom_advantage_function_path"),
    Row("use-kl-loss", "algorithm.kl_loss_coef", "a coefficient above 0 switches it on; without this flag it is 0"),
    *namesakes("algorithm", "use-unbiased-kl use-rollout-logprobs use-tis use-opsm", on),
    Row("lambd", "algorithm.lambd", default=1.0),
    Row("disable-grpo-std-normalization", "algorithm.grpo_std_normalization", "the opposite", off),
    Row("disable-rewards-normalization",
        text="grpo always compares the responses to a prompt; reinforce_plus_plus uses rewards as they are"),
    Row("use-rollout-entropy", "algorithm.report_entropy", "entropy is measured in every step", on),
    Row("get-mismatch-metrics", text="trainer and engine are always compared (docs/metrics.md)"),
    Row("use-stateless-adam", text="train.optimizer_state_dtype = bfloat16 halves the memory of AdamW's moments"),
    Row("tis-clip tis-threshold", "algorithm.tis_clip"),
    Row("use-routing-replay", "megatron.use_routing_replay", convert=on),
    Row("routing-replay-prefetch-microbatches", text="recorded routes are not read from disk"),
    Row("score-centering-top-k", text="algorithm.name decides the objective"),
    Row("pg-loss-type", text=LOSS, neutral="ppo"),
    Row("use-score-centering enable-mtp-training", text=LOSS, neutral=OFF),
    Row("use-rollout-routing-replay", "train.use_rollout_routing_replay", "overrides --use-routing-replay", on),
)  # fmt: skip
DISTILLATION = (
    Row("use-opd", "algorithm.opd_kl_coef", "a coefficient above 0 switches it on", Always(1.0)),
    Row("opd-type", text="the teacher is a directory (opd_teacher_load), servers (opd_teacher_url) or the policy "
        "(opd_self_teacher)"),
    Row("opsd-beta", "algorithm.opd_jsd_beta", "with opd_divergence = jsd", default=0.5),
    Row("opsd-privileged-info-key", "algorithm.opd_teacher_template", "the prompt and this column"),
    Row("opsd-jsd-clip", text="the divergence of a token has no bound"),
    Row("opd-prompt-messages-key teacher-tokenizer-path", "algorithm.opd_align", "text, with a teacher's directory",
        Always("text")),
    *namesakes("algorithm", "opd-kl-coef opd-teacher-load"),
    Row("opd-teacher-loads", "algorithm.opd_teacher_load", "several are averaged there; opd_teachers go by domain"),
    Row("topk-level-opd", "algorithm.opd_divergence", "true is reverse_kl", Always("reverse_kl")),
    Row("opd-top-k", "algorithm.opd_top_k"),
    Row("use-mopd", "algorithm.name", "opd, with algorithm.opd_teachers", Always("opd")),
    Row("mopd-teachers", "algorithm.opd_teachers", "the JSON becomes a table by name"),
    Row("mopd-distill-type", "algorithm.opd_divergence", "token_level is token, others are reverse_kl",
        choice(token_level="token", top_k="reverse_kl", full_vocab="reverse_kl")),
    Row("mopd-topk-k", "algorithm.opd_top_k", "with top_k"),
    Row("mopd-eps-low", "algorithm.tis_clip_low", "with use_tis and tis_mode = mask"),
    Row("mopd-eps-high", "algorithm.tis_clip", "with use_tis and tis_mode = mask"),
    Row("mopd-alpha", text="0 is algorithm.name = opd. Else name the algorithm of the rewards, and set "
        "algorithm.opd_kl_coef by hand", neutral="0 0.0"),
    Row("mopd-NAME", text="each teacher has load or url in algorithm.opd_teachers"),
    Row("opd-teacher-ckpt-step", text="convert that step with `slimectl convert` and set algorithm.opd_teacher_load"),
    Row("opd-teacher-timeout opd-teacher-retries", text="failed requests are repeated within engine.request_timeout_s"),
    Row("teacher-port teacher-warmup-port teacher-warmup-timeout-s teacher-sample-reduction-chunk-size "
        "teacher-label-reduction-chunk-size megatron-server-max-length megatron-server-update-timeout-s "
        "megatron-server-warmup no-megatron-server-warmup", text=TEACHER_SERVER),
)  # fmt: skip
TRACKING = (
    Row("use-wandb", "track.with", "wandb is added to the list", Always(["stdout", "wandb"])),
    *namesakes("track", "mode dir host group project run-id", flag="wandb-"),
    Row("wandb-key", "track.api_key", "a reference to the environment", secret("WANDB_API_KEY"), secret=True),
    *renamed("wandb-team=track.entity log-reward-category=track.log_reward_category"),
    Row("disable-wandb-random-suffix", "track.random_suffix", "the opposite", off),
    Row("wandb-always-use-train-step", "track.always_use_train_step", convert=on),
    *namesakes("track", "log-multi-turn log-passrate log-correct-samples", on),
    Row("use-tensorboard", "track.with", "tensorboard is added to the list", Always(["stdout", "tensorboard"])),
    Row("tb-project-name tb-experiment-name", "track.kwargs.tensorboard.log_dir", "tensorboard_log/PROJECT/EXPERIMENT"),
)  # fmt: skip
DEBUGGING = (
    Row("save-debug-rollout-data", "run.keep_samples", "samples are kept in the run directory", Always(True)),
    Row("save-debug-train-data", "run.keep_samples", "training data are kept in the run directory", Always("train")),
    Row("dump-details", "run.keep_samples", "as for --save-debug-train-data", Always("train")),
    Row("memory-snapshot-dir memory-snapshot-num-steps memory-recorder record-memory-history profile-target "
        "use-pytorch-profiler tensorboard-dir profile-step-start profile-step-end",
        text="set run.profile = [FIRST, LAST], in rounds"),
    Row("check-weight-update-equal", "sync.check_weight_update_equal", convert=on),
    Row("output-dir", "run.dir"),
)  # fmt: skip
NETWORK = (
    Row("http-proxy", text="export http_proxy before `slimectl run`"),
    Row("use-distributed-post", text="requests are always asynchronous; engine.server_concurrency limits them"),
)  # fmt: skip
REWARD = (
    Row("rm-type", "score.rm_type", convert=verifier),
    *namesakes("score", "reward-key rm-url"),
    Row("eval-reward-key", "eval.reward_key"),
    Row("group-rm", "score.group_rm", convert=on),
    *namesakes("score", "custom-rm-path custom-reward-post-process-path", function_path),
    Row("custom-convert-samples-to-train-data-path", "train.custom_convert_samples_to_train_data_path",
        convert=function_path),
)  # fmt: skip
BUFFER = (
    Row("rollout-buffer-url fetch-trajectory-retry-times min-batch-collection-ratio rollout-task-type",
        text="slimectl has no buffer server. Run your agent with rollout.agent (docs/agents.md)"),
    Row("loss-mask-type", text="the chat template of the model decides the mask"),
    Row("data-pad-size-multiplier", text="packed sequences are not padded"),
    *namesakes("rollout", "sample-filter-path all-samples-process-path", function_path, flag="rollout-"),
)  # fmt: skip
MEGATRON_HOOKS = (
    Row("custom-megatron-init-path", "megatron.custom_init_path", convert=function_path),
    Row("custom-megatron-before-log-prob-hook-path", "megatron.custom_before_log_prob_hook_path",
        convert=function_path),
    Row("custom-megatron-before-train-step-hook-path", "megatron.custom_before_train_step_hook_path",
        convert=function_path),
    Row("megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules megatron-deepgemm-moe-forward-layers "
        "megatron-deepgemm-moe-forward-modules", text=DEEPGEMM),
)  # fmt: skip
OTHERS = (
    Row("mtp-num-layers mtp-loss-scaling-factor", text="these layers are kept and not trained"),
    Row("ci-test ci-disable-kl-checker ci-disable-logprobs-checker ci-save-grad-norm ci-load-grad-norm "
        "ci-metric-checker-key ci-metric-checker-threshold", text=CI),
    Row("ci-train-rollout-logprob-abs-diff-threshold", "run.max_logprob_mismatch"),
    Row("custom-config-path", text="pass the same file to `slimectl run --custom-config FILE`"),
    Row("padded-vocab-size make-vocab-size-divisible-by", text="the parallel layout decides the padding"),
)  # fmt: skip
ROUTER = (
    Row("sglang-router-ip sglang-router-port", "engine.url", "IP and port together become an address"),
    Row("use-slime-router use-miles-router slime-router-NAME", text="engine.router is the policy of the one router"),
    Row("slime-router-middleware-paths", text="engine.middleware_paths takes aiohttp middleware; samples need none"),
    *renamed("sglang-router-request-timeout-secs=engine.request_timeout_s "
             "sglang-server-concurrency=engine.server_concurrency prefill-num-servers=sglang.prefill_num_servers "
             "sglang-context-length=rollout.max_context_len"),
    Row("sglang-router-policy router-policy", "engine.router"),
    Row("router-balance-abs-threshold router-balance-rel-threshold sglang-router-balance-abs-threshold "
        "sglang-router-balance-rel-threshold", text="engine.router is the policy; its thresholds are not settings"),
    Row("sglang-config", text="write the groups of the file as sglang.server_groups"),
    Row("sglang-model-path sglang-trust-remote-code sglang-random-seed sglang-enable-memory-saver sglang-tp-size "
        "sglang-port sglang-host sglang-nnodes sglang-node-rank sglang-dist-init-addr sglang-gpu-id-step "
        "sglang-base-gpu-id sglang-nccl-port sglang-skip-server-warmup sglang-enable-return-routed-experts",
        text=OWNED),
    Row("sglang-dtype", "engine.dtype", "use the same dtype in engine and trainer where you can"),
    Row("sglang-NAME", "sglang.args.NAME", "every other field of SGLang's ServerArgs"),
)  # fmt: skip

GROUPS = {
    "Start": LAUNCH, "Cluster": CLUSTER, "Training": TRAINING, "Rollout": ROLLOUT, "Fault tolerance": FAULTS,
    "Data": DATA, "Evaluation": EVALUATION, "Algorithm": ALGORITHM, "Distillation": DISTILLATION,
    "Tracking": TRACKING, "Debugging": DEBUGGING, "Network": NETWORK, "Reward": REWARD,
    "Buffer and masks": BUFFER, "Megatron hooks": MEGATRON_HOOKS, "Other flags": OTHERS, "SGLang": ROUTER,
    "Megatron's arguments": ARGUMENTS, "Megatron's model shape": SHAPE,
}  # fmt: skip
