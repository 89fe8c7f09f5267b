# %% [markdown]
# # 06 · Growing, and the last block's waste
#
# A sequence reserves nothing but the empty slots of its last block, and those are fewer than a
# block.
#
# Tutorial 01 measured what a reservation costs. Here is what is left of it with blocks: the part of
# the last block that is not filled yet. You will see it come and go while a real request runs.

# %% [markdown]
# ## Predict
#
# A prompt of seven tokens, blocks of four slots, eight new tokens: steps 0 to 7. Step 0 takes two
# blocks for the prompt. In which later steps is a block taken? How many slots of the request's
# blocks are empty at most, and how many on average?

# %% [markdown]
# ## Run
#
# A `Recorder` keeps each step: the plan, its result, and a snapshot of tables and pool.

# %%
import random

from rich import print

from minipaged import LLM, SamplingParams
from minipaged.blocks.block_table import blocks_for
from minipaged.blocks.manager import BlockManager
from minipaged.errors import InvariantBroken, OutOfBlocks
from minipaged.show import Recorder, draw_pool, make_snapshot

PROMPT = "Four score and seven years ago our"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def run(block_size, num_blocks):
    recorder = Recorder()
    llm = LLM(
        block_size=block_size,
        num_gpu_blocks_override=num_blocks,
        max_model_len=32,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        swap_space=0,
        on_step=recorder,
    )
    [output] = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    recorder.token_text = llm.llm_engine.tokenizer.token_text
    return recorder, output.outputs[0].token_ids


recorder, tokens = run(block_size=4, num_blocks=8)
empties = []
for step, frame in enumerate(recorder.frames):
    used, filled = frame.snapshot.num_used_blocks, frame.snapshot.num_filled
    empties.append(used * 4 - filled)
    print(f"step {step}  {'▮' * filled}{'▯' * empties[-1]}  {used} blocks")
print(f"empty on average: {sum(empties) / len(empties)} slots")

used = [frame.snapshot.num_used_blocks for frame in recorder.frames]
assert used == [2, 2, 3, 3, 3, 3, 4, 4]
assert empties == [1, 0, 3, 2, 1, 0, 3, 2]

# %% [markdown]
# A block is taken in the steps 2 and 6, when the last one is full, and not a step earlier. At most
# 3 slots are empty: one less than a block.
#
# The last of the eight new tokens is not in the pool. It was sampled, and nobody feeds it any more.

# %%
print(recorder.draw(2))
assert recorder.frames[2].snapshot.tables[0][-1].num_filled == 1

# %% [markdown]
# ## Predict
#
# Will the model write other tokens if blocks have one slot, or sixteen? And with one block of 32,
# as long as the longest request that this engine allows: contiguous KV, as before the paper?

# %% [markdown]
# ## Run

# %%
for block_size, num_blocks in ((1, 32), (16, 2), (32, 1)):
    other, same_tokens = run(block_size, num_blocks)
    last = other.frames[-1].snapshot
    empty = last.num_used_blocks * block_size - last.num_filled
    print(f"blocks of {block_size:>2}: {empty:>2} empty slots at the end")
    assert same_tokens == tokens
print("the same tokens each time")
assert blocks_for(2048, 1) == 2048 and blocks_for(2048, 16) == 128

# %% [markdown]
# The block size decides how much memory a request takes, never what it says. This library calls
# that its **engine law**; much of the test suite is about it.
#
# Then why not blocks of one slot? A table of 2,048 tokens would have 2,048 entries instead of 128,
# and attention would read memory in scattered crumbs. The paper measured it: best are 16 to 128 for
# long conversations, 16 and 32 for short ones (Figure 18b).

# %% [markdown]
# ## Break it
#
# A manager might be generous and take a block ahead, so that the next step has it ready. What does
# that cost?


# %%
class GenerousManager(BlockManager):
    def grow(self, seq_id, num_tokens):
        copies = super().grow(seq_id, num_tokens)
        self.table(seq_id).append(self.allocator.allocate(1))
        return copies


def fill_with_requests(manager):
    """Requests of eight tokens, until no block is left."""
    for number in range(100):
        try:
            manager.grow(number, 8)
        except OutOfBlocks:
            break
    tables = manager.tables()
    count = sum(table.num_filled == 8 for table in tables.values())
    entries = {number: table.entries() for number, table in tables.items()}
    print(draw_pool(make_snapshot(4, manager.num_blocks, entries)))
    print(f"requests: {count}")
    return count


assert fill_with_requests(BlockManager(16, block_size=4)) == 8
generous = GenerousManager(16, block_size=4)
assert fill_with_requests(generous) == 5

# %% [markdown]
# Five requests instead of eight, for blocks that nobody has written to. `check()` knows the rule:

# %%
try:
    generous.check()
except InvariantBroken as error:
    print(f"check() says: {error}")
else:
    raise AssertionError("a spare block must not go unnoticed")

# %% [markdown]
# ## Exercise
#
# A sequence grows from one token to any length. On average over its life, how many slots of its
# last block are empty? Give a formula of the block size. (Let its life be a whole number of
# blocks.)


# %%
def my_average(block_size):
    return ...  # slots


def check(average):
    for block_size in (1, 2, 4, 16, 32):
        manager = BlockManager(8, block_size)
        empty = []
        for num_tokens in range(1, 8 * block_size + 1):
            manager.grow(0, num_tokens)
            entry = manager.table(0).entries()[-1]
            empty.append(block_size - entry.num_filled)
        measured = sum(empty) / len(empty)
        answer = average(block_size)
        assert answer == measured, f"{block_size}: {answer}, not {measured}"
    print("right")


if my_average(4) is not ...:
    check(my_average)

# %% [markdown]
# ## Solution
#
# While a block fills, its empty slots are B − 1, B − 2, … 1, 0. The average is (B − 1) / 2: 7.5
# slots with blocks of 16.


# %%
def average(block_size):
    return (block_size - 1) / 2


check(average)

# %% [markdown]
# So you can tell what part of its blocks a sequence of a given length wastes. For the paper's short
# workload (prompt and answer are 78 tokens on average) and its long one (499):

# %%
rng = random.Random(0)
for mean in (78, 499):
    lengths = [int(rng.expovariate(1 / mean)) + 1 for _ in range(20_000)]
    for block_size in (16, 128):
        manager = BlockManager(20_000, block_size)
        taken = 0
        for length in lengths:
            manager.grow(0, length)
            taken += len(manager.table(0)) * block_size
            manager.free(0)
        part = 1 - sum(lengths) / taken
        print(f"{mean:>3} tokens, blocks of {block_size:>3}: {part:.0%} empty")
        if mean == 78 and block_size == 16:
            assert part < 0.12
assert 0.08 < part < 0.16  # 499 tokens in blocks of 128

# %% [markdown]
# ## Where this is in the code
#
# `BlockManager.grow` in `blocks/manager.py` is the rule; `num_blocks_needed` beside it tells the
# scheduler beforehand. In the paper: section 4.3, and 7.2 for block sizes.
#
# Next, 07: two sequences that begin alike need not hold their beginning twice.
