# %% [markdown]
# # 08 · Copy-on-write
#
# A sequence that must write into a shared block gets a copy of its own first; the others keep the
# block as it was.
#
# Full blocks are never written again, so they can be shared for ever. The last block of a prompt is
# mostly not full. When a fork shares it, both sequences want to write into the same free slot, with
# different tokens.

# %% [markdown]
# ## Predict
#
# This is the paper's Figure 8. A prompt of seven tokens lies in the blocks 7 and 1, four slots
# each, and is shared by A and B. Both sample a token. A writes first, then B.
#
# How many blocks are copied: none, one, or two? Which blocks does each table name in the end?

# %% [markdown]
# ## Run
#
# `grow` returns the copies that must be made before anything is written, as pairs: source block,
# destination block.

# %%
from unittest.mock import patch

from rich import print

from minipaged import LLM, SamplingParams
from minipaged.blocks import manager as manager_module
from minipaged.blocks.manager import BlockManager
from minipaged.show import Recorder, draw_pool, draw_tables, make_snapshot

A, B = 0, 1


def snapshot(manager):
    tables = {seq: table.entries() for seq, table in manager.tables().items()}
    return make_snapshot(manager.block_size, manager.num_blocks, tables)


manager = BlockManager(8, 4, free_order=[7, 1, 3, 0, 2, 4, 5, 6])
manager.grow(A, 7)
manager.fork(A, B)
copies_of_a = manager.grow(A, 8)
counts_between = manager.allocator.ref_counts
copies_of_b = manager.grow(B, 8)
print(f"A writes: copies {copies_of_a}.  B writes: copies {copies_of_b}.")
print(draw_tables(snapshot(manager)))
print(draw_pool(snapshot(manager)))

assert copies_of_a == [(1, 3)] and copies_of_b == []
assert manager.table(A).physical_blocks == (7, 3)
assert manager.table(B).physical_blocks == (7, 1)
assert counts_between[1] == 1  # after A had left, B was alone

# %% [markdown]
# One copy. A's new block 3 *replaces* block 1 in its table, and the count of block 1 falls to one.
# When B writes, it finds itself alone, and writes in place. Block 7 is full, and shared for as long
# as both live.

# %% [markdown]
# ## With the model
#
# The engine does the same in a request for two samples. The recorder shows the step in which it
# happens: the copy stands first in the plan, and the worker makes it in all layers before anything
# is written.

# %%
recorder = Recorder()
llm = LLM(
    block_size=4,
    num_gpu_blocks_override=8,
    max_model_len=32,
    max_num_batched_tokens=32,
    max_num_seqs=4,
    swap_space=0,
    free_order=[7, 1, 3, 0, 2, 4, 5, 6],
    on_step=recorder,
)
recorder.token_text = llm.llm_engine.tokenizer.token_text
PROMPT = "Four score and seven years ago our"
TWO = SamplingParams(n=2, max_tokens=6, seed=7, ignore_eos=True)


def two_samples():
    [output] = llm.generate(PROMPT, TWO, use_tqdm=False)
    return [sample.token_ids for sample in output.outputs]


right = two_samples()
print(recorder.draw(1))

assert [frame.plan.copies for frame in recorder.frames][:2] == [(), ((1, 3),)]
assert sum(len(frame.plan.copies) for frame in recorder.frames) == 1

# %% [markdown]
# ## Predict
#
# Suppose the rule is forgotten: each sequence writes into its last block, shared or not. Reference
# counts are kept as before. Will `check()` notice? Will you, in the text?

# %% [markdown]
# ## Break it
#
# One function decides whether a write would reach a shared block. We let it say no.

# %%
with patch.object(
    manager_module, "writes_to_shared_block", lambda *arguments: False
):
    wrong = two_samples()
    llm.llm_engine.blocks.check()  # says nothing: the counts are right

decode = llm.llm_engine.tokenizer.decode
for name, with_rule, without in zip("AB", right, wrong, strict=True):
    print(f"{name} with the rule:    {PROMPT}{decode(with_rule)}")
    print(f"{name} without the rule: {PROMPT}{decode(without)}")

assert [sample[:1] for sample in wrong] == [sample[:1] for sample in right]
assert wrong != right

# %% [markdown]
# The first new token of each is the same, since it was sampled before anything was written. Then
# both wrote into slot 3 of block 1, and the later one won. From there on one of the two attends to
# a token that it never said.
#
# All counts were right, so the conservation law is silent. Only the other law notices: *a sample
# must be what it is when it runs alone*. So the tests of this library compare tokens too, in
# thousands of random situations.

# %%
alone = [
    llm.generate(
        PROMPT,
        SamplingParams(max_tokens=6, seed=7 + sample, ignore_eos=True),
        use_tqdm=False,
    )[0]
    for sample in range(2)
]
assert [output.outputs[0].token_ids for output in alone] == right
print("with the rule, each sample is what it is alone")

# %% [markdown]
# ## What it costs
#
# A copy is at most one block for each sequence, whatever the length of the prompt. A system that
# copies the whole prompt at a fork moves this much instead (SmolLM2, 1,001 tokens, four samples):

# %%
block_bytes = llm.llm_engine.worker.cache.num_bytes // 8
long = BlockManager(num_blocks=2000, block_size=4)
long.grow(0, 1001)
for child in (1, 2, 3):
    long.fork(0, child)
copied = sum(len(long.grow(sample, 1002)) for sample in range(4))
eager = 3 * len(long.table(0))
print(f"copy-on-write: {copied} blocks, {copied * block_bytes / 2**20:.1f} MiB")
print(
    f"a copy at each fork: {eager} blocks, {eager * block_bytes / 2**20:.0f} MiB"
)

assert copied == 3 and eager == 3 * 251

# %% [markdown]
# ## Exercise
#
# k sequences share a prompt of p tokens, blocks have B slots, and all of them write one token. How
# many blocks are copied, all together?


# %%
def my_copies(k, p, block_size):
    return ...  # a number


def check(num_copies):
    for block_size in (1, 4, 16):
        for k in (1, 2, 5):
            for p in range(1, 35):
                manager = BlockManager(200, block_size)
                manager.grow(0, p)
                for child in range(1, k):
                    manager.fork(0, child)
                made = sum(len(manager.grow(seq, p + 1)) for seq in range(k))
                manager.check()
                answer = num_copies(k, p, block_size)
                case = f"k={k}, p={p}, B={block_size}"
                assert answer == made, f"{case}: {made} copies, not {answer}"
    print("right")


if my_copies(2, 7, 4) is not ...:
    check(my_copies)

# %% [markdown]
# ## Solution
#
# If the last block is full, nobody writes into it: no copy. Otherwise all but the last writer copy
# it.


# %%
def num_copies(k, p, block_size):
    return 0 if p % block_size == 0 else k - 1


check(num_copies)

# %% [markdown]
# ## Where this is in the code
#
# `blocks/copy_on_write.py` is the rule; the copies travel in `StepPlan.copies`, and `copy_blocks`
# in `worker/kv_cache.py` makes them. In the paper: section 4.4, Figure 8.
#
# Next, 09: what sampling several answers looks like as a whole.
