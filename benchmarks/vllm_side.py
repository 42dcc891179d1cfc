"""vLLM's side of benchmarks/engine.py, run by the Python that has vLLM: batches of requests in, CPU seconds out.

    python benchmarks/vllm_side.py MODEL DTYPE MAX_RUNNING eager|compiled

Reads a line of JSON for every batch, [[prompt tokens, tokens of answer], ...], and answers {"seconds": CPU seconds of
this process, "tokens": sampled}. The engine lives in this process. Answers are sampled at temperature 1 with the
log-probability of every sampled token, as a trainer needs them, and without seeds of their own, which cost vLLM time.
Prompts are cached within a batch, not from one batch to the next.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    model, dtype, max_running, mode = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is no answer
    if mode == "eager":
        os.environ["TORCHDYNAMO_DISABLE"] = "1"

    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    engine = LLM(
        model=model,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[dtype],
        enforce_eager=mode == "eager",
        max_num_seqs=int(max_running),
        max_model_len=1024,
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=True,
        distributed_executor_backend="uni",
        generation_config="vllm",
        disable_log_stats=True,
    )
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        requests = json.loads(line)
        engine.reset_prefix_cache()
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [
            SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, logprobs=0, detokenize=False)
            for _, count in requests
        ]
        started = time.process_time()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.process_time() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
