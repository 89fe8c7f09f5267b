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
    "scheduling/plan_builder.py": "the step as plain integers",
    "model/batch.py": "the plan as a ragged batch of tensors",
    "model/kv_layer.py": "one layer's keys and values, in slots",
    "model/attention/reference.py": "PagedAttention, the paper's equation",
    "model/llama.py": "the model",
    "worker/kv_cache.py": "the pool, and block copies",
    "worker/worker.py": "applies a plan",
    "worker/results.py": "logits of the rows that speak",
    "worker/sampler.py": "logits to tokens",
    "decoding/stopping.py": "when a sequence ends",
    "engine/answer.py": "one sequence's text and its end",
    "engine/request.py": "one request from arrival to output",
    "engine/llm_engine.py": "plan, apply, update",
    "engine/llm.py": "LLM.generate",
}
CORE_LIMIT = 2500


def num_lines(path: str) -> int:
    return len((ROOT / "minipaged" / path).read_text().splitlines())


def render() -> str:
    """The table as the README must have it."""
    rows = [f"| `{path}` | {num_lines(path)} | {what} |" for path, what in CORE.items()]
    total = f"| together | {sum(map(num_lines, CORE))} | |"
    return "\n".join(["| file | lines | |", "|---|---|---|", *rows, total]) + "\n"


def main() -> None:
    before, rest = README.read_text().split(BEGIN)
    _, after = rest.split(END)
    README.write_text(before + BEGIN + render() + END + after)


if __name__ == "__main__":
    main()
