"""vLLM, serving workloads that another process sends: run by the Python of an environment that has vLLM.

    PYTHON vllm_process.py '{"model": DIRECTORY, "dtype": "float32", "enforce_eager": false, "max_model_len": 2048}'

Each line in is a workload as JSON, each line out {"seconds": …, "tokens": …}; a first line out tells vLLM's version.
That environment need not have minipaged, so nothing of it is imported here. See vllm_peer.py for the other end.
"""

import json
import os
import sys
import time


def main() -> None:
    """Load, say the version, then serve a workload a line until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints goes to stderr

    import vllm

    llm = vllm.LLM(**json.loads(sys.argv[1]), max_num_seqs=256, enable_prefix_caching=False, disable_log_stats=True)
    print(json.dumps({"version": vllm.__version__}), file=answers)
    for line in sys.stdin:
        workload = json.loads(line)
        prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in workload]
        params = [vllm.SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in workload]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers)


if __name__ == "__main__":  # vLLM's own processes import this file again
    main()
