"""The reading order that the README prints, with line counts. `python -m tests.reading_order` writes it anew."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- reading order -->\n", "<!-- end of reading order -->"

# The core: from a block to LLM.generate. What each file is for, in the order in which they explain each other.
CORE = {
    "step.py": "the contract: what the scheduler asks of the worker, and what comes back",
    "blocks/allocator.py": "physical blocks: a free list and reference counts",
    "blocks/block_table.py": "logical to physical blocks, and how far they are filled",
    "blocks/copy_on_write.py": "a write never reaches a block that somebody else reads",
    "blocks/manager.py": "grow, fork, free: all that decoding does to memory",
    "scheduling/sequence.py": "tokens, and how many of them are computed: the one rule",
    "scheduling/group.py": "a request's sequences and its states",
    "scheduling/preemption.py": "who must go",
    "scheduling/share.py": "a step's tokens, divided over sequences",
    "scheduling/scheduler.py": "who runs this step",
    "scheduling/admission.py": "who may start",
    "scheduling/plan_builder.py": "the step as plain integers",
    "model/batch.py": "the plan as a ragged batch of tensors",
    "model/kv_layer.py": "one layer's keys and values, in slots",
    "model/attention/reference.py": "PagedAttention, the paper's equation",
    "model/llama.py": "the model",
    "worker/kv_cache.py": "the pool, and block copies",
    "worker/worker.py": "applies a plan",
    "worker/results.py": "logits of the rows that speak",
    "decoding/stopping.py": "when a sequence ends",
    "engine/llm_engine.py": "plan, apply, update",
    "engine/llm.py": "LLM.generate",
}
CORE_LIMIT = 2500

# What the core calls and does not explain: each can be read by itself, when it is wanted.
CHAPTERS = {
    "arguments and results": [
        "config.py",
        "engine_args.py",
        "sampling_params.py",
        "beam_search_params.py",
        "outputs.py",
        "errors.py",
        "checks.py",
    ],
    "what a viewer sees": ["snapshot.py", "scheduling/viewing.py"],
    "pictures": [
        "show/frame.py",
        "show/labels.py",
        "show/pool_state.py",
        "show/pool_picture.py",
        "show/pool_strip.py",
        "show/contents.py",
        "show/table_picture.py",
        "show/queue_picture.py",
        "show/words.py",
        "show/step_picture.py",
        "show/json_frames.py",
        "show/recorder.py",
        "show/trace.py",
        "show/output_path.py",
    ],
    "the step view": [
        "watch/__main__.py",
        "watch/scenes.py",
        "watch/run.py",
        "watch/player.py",
        "watch/keys.py",
    ],
    "recompute keeps sharing": ["scheduling/recompute.py", "scheduling/queues.py"],
    "swapping": ["blocks/swap.py", "scheduling/swapping.py"],
    "what is counted": ["metrics.py", "engine/metering.py"],
    "prefix caching": [
        "blocks/prefix_cache.py",
        "blocks/prefix_sharing.py",
        "blocks/eviction.py",
        "engine/pinned_prefix.py",
    ],
    "beam search": ["decoding/beam_search.py", "engine/beam_request.py"],
    "sampling": [
        "sampling_rules.py",
        "worker/sampler.py",
        "worker/noise.py",
        "worker/logits.py",
        "worker/candidates.py",
        "worker/logprobs.py",
    ],
    "attention, the fast way": ["model/attention/backend.py", "model/attention/gather.py"],
    "the compiled model": ["model/attention/compiled.py", "model/attention/prefill.py", "model/compile.py"],
    "Triton kernels": [
        "model/attention/triton_backend.py",
        "model/attention/triton_attend.py",
        "model/attention/triton_decode.py",
        "model/attention/triton_prefill.py",
        "model/attention/triton_write.py",
    ],
    "layers and positions": ["model/layers.py", "model/packed.py", "model/rope.py", "model/weights.py"],
    "tensor parallelism": [
        "model/ranks.py",
        "model/parallel.py",
        "worker/plan_message.py",
        "worker/parallel_worker.py",
        "worker/rank.py",
        "worker/torch_ranks.py",
        "worker/meeting.py",
        "worker/rank_processes.py",
        "worker/launch.py",
    ],
    "text": [
        "engine/answer.py",
        "text/detokenizer.py",
        "text/stop_window.py",
        "text/tokenizer.py",
        "text/chat_template.py",
    ],
    "requests": [
        "engine/request.py",
        "engine/reports.py",
        "engine/intake.py",
        "engine/prompts.py",
        "engine/sampling_rules.py",
        "engine/interrupt.py",
        "engine/progress.py",
    ],
    "sizes and devices": ["worker/pool_size.py", "worker/device.py"],
    "weights and formats": [
        "loading/__init__.py",
        "loading/hf_config.py",
        "loading/safetensors_files.py",
        "loading/hub.py",
        "loading/default_model.py",
        "loading/cache.py",
        "loading/gguf_file.py",
        "loading/gguf_config.py",
        "loading/gguf_tokenizer.py",
        "loading/gguf_weights.py",
        "loading/progress.py",
    ],
    "the chat": [
        "chat/__main__.py",
        "chat/session.py",
        "engine/conversation.py",
        "chat/commands.py",
        "chat/looks.py",
        "chat/questions.py",
        "chat/streams.py",
    ],
    "the tutorial player": ["tutorial/__main__.py", "tutorial/cells.py", "tutorial/player.py"],
    "measurements": [
        "bench/__main__.py",
        "bench/report.py",
        "bench/idle_worker.py",
        "bench/roofs.py",
        "bench/workload.py",
        "bench/contestants.py",
        "bench/vllm_peer.py",
        "bench/vllm_process.py",
        "bench/throughput.py",
        "bench/single.py",
        "bench/compare.py",
        "bench/attention.py",
        "bench/memory.py",
        "bench/sharing.py",
        "bench/preemption.py",
        "bench/control_plane.py",
        "bench/ranks.py",
    ],
}


def num_lines(path: str) -> int:
    return len((ROOT / "minipaged" / path).read_text().splitlines())


def render() -> str:
    """The tables as the README must have them."""
    rows = [f"| `{path}` | {num_lines(path)} | {what} |" for path, what in CORE.items()]
    total = f"| together | {sum(map(num_lines, CORE))} | |"
    core = "\n".join(["| file | lines | |", "|---|---|---|", *rows, total])
    chapters = "\n".join(
        f"| {name} | {sum(map(num_lines, paths))} | {', '.join(f'`{path}`' for path in paths)} |"
        for name, paths in CHAPTERS.items()
    )
    return f"{core}\n\n| chapter | lines | files |\n|---|---|---|\n{chapters}\n"


def main() -> None:
    before, rest = README.read_text().split(BEGIN)
    _, after = rest.split(END)
    README.write_text(before + BEGIN + render() + END + after)


if __name__ == "__main__":
    main()
