# %% [markdown]
# # 07 · Fork and reference counts
#
# Sequences with the same beginning share its blocks; a count on each block says how many tables
# name it.
#
# Ask for three answers to one prompt, and there are three sequences that begin alike. Over
# contiguous memory each needs a copy of the prompt's keys and values. Over blocks, a second table
# that names the same blocks is enough. Operating systems do this when a process forks.

# %% [markdown]
# ## Predict
#
# A prompt of ten tokens lies in three blocks of four slots. It is forked twice, so that there are
# three sequences, A, B and C. How many blocks are in use now? What are the reference counts?

# %% [markdown]
# ## Run

# %%
from rich import print

from minipaged.blocks.manager import BlockManager
from minipaged.errors import DoubleFree, InvariantBroken
from minipaged.show import draw_pool, draw_tables, make_snapshot

A, B, C, D = range(4)


def snapshot(manager):
    tables = {seq: table.entries() for seq, table in manager.tables().items()}
    return make_snapshot(manager.block_size, manager.num_blocks, tables)


manager = BlockManager(num_blocks=8, block_size=4)
manager.grow(A, 10)
manager.fork(A, B)
manager.fork(A, C)
print(draw_pool(snapshot(manager)))
print(draw_tables(snapshot(manager)))

assert manager.num_free == 5
assert manager.allocator.ref_counts == (3, 3, 3, 0, 0, 0, 0, 0)

# %% [markdown]
# Three blocks, as before, each with three references (`×3`). A fork takes no block, so it cannot
# fail for lack of memory, and it moves no byte.
#
# The three tables are separate lists. From here on each sequence grows by itself; what happens to
# the last block, which is only half full, is the subject of tutorial 08.

# %% [markdown]
# ## Predict
#
# A ends, though it is the one that computed the prompt. Which blocks are free after that? And when
# B and C have ended too?

# %% [markdown]
# ## Run

# %%
for sequence in (A, B, C):
    manager.free(sequence)
    manager.check()
    counts = manager.allocator.ref_counts
    name = "ABC"[sequence]
    print(f"after {name} has ended: {manager.num_free} free, counts {counts}")
    if sequence == A:
        assert manager.num_free == 5 and counts[:3] == (2, 2, 2)

assert manager.num_free == 8

# %% [markdown]
# Nobody owns a block. A sequence that ends drops its references, and the block is free when the
# last one is dropped. Parent and child are words for the moment of the fork, and mean nothing
# afterwards.

# %% [markdown]
# ## What it saves
#
# The paper counts it like this (section 6.3): blocks saved, divided by the blocks that would be
# needed without sharing. Take a prompt of 64 tokens, forked into k sequences that have written
# nothing yet.

# %%
for k in (2, 4, 6):
    shared = BlockManager(num_blocks=64, block_size=16)
    shared.grow(0, 64)
    for child in range(1, k):
        shared.fork(0, child)
    logical = sum(len(table) for table in shared.tables().values())
    physical = shared.num_blocks - shared.num_free
    saving = (logical - physical) / logical
    print(
        f"{k} sequences: {logical} logical blocks in {physical}: {saving:.1%}"
    )
    assert abs(saving - (k - 1) / k) < 1e-9

# %% [markdown]
# That is the upper bound, (k − 1) / k: all is shared. Answers are not, so what is saved in the end
# depends on how long the prompt is beside them. Tutorials 09 and 10 measure it, and find 6 to 10 %
# and 38 to 55 % in the paper.

# %% [markdown]
# ## Break it
#
# A fork that copies the table and forgets the counts looks right at first.


# %%
class CarelessManager(BlockManager):
    def fork(self, parent_id, child_id):
        self._tables[child_id] = self.table(parent_id).fork()


careless = CarelessManager(num_blocks=8, block_size=4)
careless.grow(A, 10)
careless.fork(A, B)
print(draw_tables(snapshot(careless)))
try:
    careless.check()
except InvariantBroken as error:
    print(f"check() says: {error}")
else:
    raise AssertionError("a wrong count must not go unnoticed")

# %% [markdown]
# Nothing has gone wrong yet. Now A ends, and its blocks are free, says the count. B still reads
# them. The next request that comes gets them sooner or later.

# %%
careless.free(A)
careless.grow(C, 32)  # a request that takes all eight blocks
print(draw_pool(snapshot(careless)))
b_reads, c_writes = careless.table(B), careless.table(C)
stolen = set(b_reads.physical_blocks) & set(c_writes.physical_blocks)
print(f"B reads these blocks, and C writes into them: {sorted(stolen)}")

assert stolen == {0, 1, 2}

# %% [markdown]
# B goes on as if its prompt had become C's. There is no error before somebody frees for the second
# time, and that may be much later, or never.

# %%
careless.free(C)
try:
    careless.free(B)
except DoubleFree as error:
    print(f"DoubleFree: {error}")
else:
    raise AssertionError("these blocks were free already")

# %% [markdown]
# A count too low hands memory out twice; a count too high never gives it back. `check()` compares
# every count with the tables, and so finds either on the spot.

# %% [markdown]
# ## Exercise
#
# With a pool of eight blocks of four slots, this happens: A grows to 8 tokens. B is forked from A.
# B grows to 9 tokens. C is forked from B. A ends. D is forked from C, and C grows to 13 tokens.
#
# Write down the reference counts. Blocks are handed out by number, 0 first, until all have been
# used once. (C writes into a block that is shared at that moment. It gets a block of its own for
# that, and then one more.)

# %%
my_counts = ...  # eight numbers: [block 0, block 1, ...]


def check(counts):
    manager = BlockManager(num_blocks=8, block_size=4)
    manager.grow(A, 8)
    manager.fork(A, B)
    manager.grow(B, 9)
    manager.fork(B, C)
    manager.free(A)
    manager.fork(C, D)
    manager.grow(C, 13)
    manager.check()
    assert len(counts) == 8, "one count for each of the eight blocks"
    for block, count in enumerate(manager.allocator.ref_counts):
        assert counts[block] == count, f"block {block}: look who names it"
    print(draw_tables(snapshot(manager)))
    print("right")


if my_counts is not ...:
    check(my_counts)

# %% [markdown]
# ## Solution
#
# B, C and D name the blocks 0 and 1; A has left. Block 2 was B's own, and then B's, C's and D's; C
# has gone from it to block 3, and needed block 4 for its thirteenth token.

# %%
check([3, 3, 2, 1, 1, 0, 0, 0])

# %% [markdown]
# ## Where this is in the code
#
# `BlockManager.fork` and `free` in `blocks/manager.py`; the counts are in `blocks/allocator.py`. In
# the paper: section 4.4.
#
# Next, 08: what happens when one of the sharers writes?
