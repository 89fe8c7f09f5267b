"""Rules of every room, and for each one the small change that breaks it. (`python -m tests.breaks` runs them.)"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Break:
    """`old`, which stands once in `file` (under minipaged/), becomes `new`; `tests` are those that name the rule."""

    rule: str  # the rule that is broken, in words
    file: str
    old: str
    new: str
    tests: str

    @property
    def room(self) -> str:
        return self.file.split("/")[0]


BREAKS = {
    "lost-decrement": Break(
        "a table that lets go of a block takes one off its count",
        "blocks/allocator.py",
        "self._ref_counts[block] -= 1",
        "self._ref_counts[block] -= self._ref_counts[block] == 1",
        "tests/property/test_blocks.py",
    ),
    "skipped-copy": Break(
        "a write into a shared block comes after a copy of it",
        "scheduling/plan_builder.py",
        "self._copies += self._blocks.grow(seq.seq_id, share.end)",
        "self._blocks.grow(seq.seq_id, share.end)",
        "tests/property/test_groups.py",
    ),
    "copy-that-keeps-the-old-block": Break(
        "the copy of a block takes its place in the table, and the old one loses a reference",
        "blocks/copy_on_write.py",
        "    allocator.free(old)\n",
        "",
        "tests/unit/blocks/test_manager.py",
    ),
    "evicted-but-found": Break(
        "an evicted block cannot be found any more",
        "blocks/allocator.py",
        "        self._cache.forget(block)\n        self._on_evict(block)\n",
        "        self._on_evict(block)\n",
        "tests/unit/blocks/test_eviction.py",
    ),
    "hash-taken-for-proof": Break(
        "a hash finds a cached block, and the tokens prove it",
        "blocks/prefix_cache.py",
        "entry is None or not entry.parent.is_same(parent) or entry.token_ids != tokens",
        "entry is None",
        "tests/unit/blocks/test_prefix_cache.py",
    ),
    "forgotten-sharer": Break(
        "every sequence of a group is swapped, those too that share all their blocks",
        "blocks/swap.py",
        "    for seq_id in seq_ids:\n        old =",
        "    for seq_id in seq_ids[:1]:\n        old =",
        "tests/property/test_blocks.py",
    ),
    "swap-that-forgets-sharing": Break(
        "a block that is shared on the device is shared on the host",
        "blocks/swap.py",
        "return list(dict.fromkeys(block for",
        "return list((block for",
        "tests/unit/blocks/test_swap.py",
    ),
    "hit-on-an-uncomputed-block": Break(
        "blocks that a failed step never computed cannot be found in the cache",
        "scheduling/scheduler.py",
        "            self.prefixes.withdraw(self._unconfirmed)\n",
        "            pass\n",
        "tests/property/test_groups.py",
    ),
    "swap-that-was-never-made": Break(
        "a group that a failed step swapped out is recomputed",
        "scheduling/swapping.py",
        "for group in self._unconfirmed if _held(group, self._host)",
        "for group in self._unconfirmed if False",
        "tests/unit/scheduling/test_swapping.py",
    ),
    "earliest-victim": Break(
        "the latest arrival is preempted",
        "scheduling/preemption.py",
        "return running[-1] if must else None",
        "return running[0] if must else None",
        "tests/property/test_scheduler.py",
    ),
    "no-claim-on-blocks": Break(
        "admission leaves a block for every sequence that is about to need one",
        "scheduling/admission.py",
        "return num_blocks_to_grow(group, 1, self._blocks) + group.num_unforked",
        "return 0",
        "tests/unit/scheduling/test_scheduler.py",
    ),
    "queue-jumper": Break(
        "the first that does not fit stops all behind it",
        "scheduling/admission.py",
        "self._start(group, known, builder):\n                break\n",
        "self._start(group, known, builder):\n                num_seqs -= group.num_seqs\n                continue\n",
        "tests/property/test_scheduler.py",
    ),
    "recompute-that-skips-a-token": Break(
        "a recomputed sequence starts again at its first token",
        "scheduling/recompute.py",
        "        seq.num_computed = 0\n",
        "        seq.num_computed = min(1, seq.num_computed)\n",
        "tests/unit/scheduling/test_scheduler.py",
    ),
    "forked-twice": Break(
        "a group is forked once, however often its prompt is computed",
        "scheduling/scheduler.py",
        "        group.num_unforked = max(0, group.num_unforked - 1)\n",
        "",
        "tests/unit/engine/test_parallel_sampling.py",
    ),
    "one-token-too-many": Break(
        "max_tokens counts the token that was just appended",
        "decoding/stopping.py",
        "num_output_tokens >= limits.max_tokens",
        "num_output_tokens > limits.max_tokens",
        "tests/unit/decoding/test_stopping.py",
    ),
    "beam-that-stops-too-early": Break(
        "a beam search goes on while a running beam may still win",
        "decoding/beam_search.py",
        "return rules.score(leader.cumulative_logprob, length) <= finished[-1].score",
        "return True",
        "tests/unit/decoding/test_beam_search.py",
    ),
    "leaked-stop-string": Break(
        "text that may grow into a stop string is held back",
        "text/stop_window.py",
        "self._kept = self._beginning_of_a_stop(text)",
        'self._kept = ""',
        "tests/property/test_text.py",
    ),
    "unread-block-table": Break(
        "attention reads the block that the table names",
        "model/attention/reference.py",
        "physical = block_table[logical]",
        "physical = block_table[0] + logical",
        "tests/unit/model/test_attention.py",
    ),
    "read-past-the-end": Break(
        "slots that nobody filled are not read",
        "model/attention/gather.py",
        "_additive(places < lens, dtype)",
        "_additive(places <= lens, dtype)",
        "tests/unit/model/test_attention.py",
    ),
    "padding-that-counts": Break(
        "what pads a tile has no weight",
        "model/attention/compiled.py",
        "device=query.device) >= tiles.filled[:, None]",
        "device=query.device) > tiles.filled[:, None]",
        "tests/unit/model/test_compiled_attention.py",
    ),
    "heads-that-are-not-summed": Break(
        "the parts that ranks compute of a hidden state are summed",
        "model/parallel.py",
        "return self.ranks.all_reduce(super().forward(x))",
        "return super().forward(x)",
        "tests/unit/model/test_parallel.py",
    ),
    "values-for-keys": Break(
        "keys move with keys and values with values",
        "worker/kv_cache.py",
        "_copy(before.value, after.value, sources, targets)",
        "_copy(before.key, after.value, sources, targets)",
        "tests/property/test_engine_law.py",
    ),
    "noise-that-ignores-the-position": Break(
        "the noise of a token is a function of seed, position and token",
        "worker/noise.py",
        "splitmix64(splitmix64(seeds + GAMMA) + positions)",
        "splitmix64(splitmix64(seeds + GAMMA) + positions * 0)",
        "tests/property/test_sampling.py",
    ),
    "unpermuted-rows": Break(
        "a GGUF file's rows of Q and K are put back in order",
        "loading/gguf_weights.py",
        "    if place.heads:\n",
        "    if False:\n",
        "tests/unit/loading/test_gguf_file.py",
    ),
    "reported-twice": Break(
        "a request reports its end once",
        "engine/reports.py",
        "        self._new, self._again = {}, []\n        return outputs",
        "        return outputs",
        "tests/unit/engine/test_llm_engine.py",
    ),
}
