# %% [markdown]
# # 03 · A block table by hand
#
# A manager hands out blocks one at a time, and three calls are enough: grow, fork, free.
#
# The paper's Figure 6 follows one request: "Four score and seven years ago our" is a prompt of
# seven tokens, blocks have four slots, and the free blocks happen to be handed out in the order 7,
# 1, 3. We do the same by hand, with the class that the engine uses: `BlockManager`.

# %% [markdown]
# ## Predict
#
# On a sheet of paper, draw the block table after the prompt of seven tokens: for each logical
# block, the physical block and how many of its slots are filled. Then draw it again after the next
# token, and after one more.

# %% [markdown]
# ## Run
#
# `grow(sequence, n)` gives a sequence slots for its first n tokens. It takes a block only if the
# last one is full.

# %%
from rich import print

from minipaged.blocks.manager import BlockManager
from minipaged.errors import DoubleFree, InvariantBroken, OutOfBlocks
from minipaged.show import draw_pool, draw_tables, make_snapshot


def snapshot(manager):
    tables = {
        number: table.entries() for number, table in manager.tables().items()
    }
    return make_snapshot(manager.block_size, manager.num_blocks, tables)


manager = BlockManager(
    num_blocks=8, block_size=4, free_order=[7, 1, 3, 0, 2, 4, 5, 6]
)
manager.grow(0, 7)
print(draw_tables(snapshot(manager)))
assert manager.table(0).entries() == ((7, 4), (1, 3))

# %%
manager.grow(0, 8)
print(draw_tables(snapshot(manager)))
assert manager.table(0).entries() == (
    (7, 4),
    (1, 4),
)  # no new block: there was a free slot

# %%
manager.grow(0, 9)
print(draw_tables(snapshot(manager)))
assert manager.table(0).entries() == ((7, 4), (1, 4), (3, 1))

# %% [markdown]
# Those are the three pictures of Figure 6. All blocks before the last one are full, so one number
# (nine tokens) says how far each of them is filled.

# %% [markdown]
# ## Predict
#
# A second request comes with six tokens, and then both grow by one token at a time, in turns, four
# times each. Will the blocks of a request lie side by side?

# %% [markdown]
# ## Run

# %%
manager.grow(1, 6)
for step in range(1, 5):
    manager.grow(0, 9 + step)
    manager.grow(1, 6 + step)
print(draw_pool(snapshot(manager)))
print(draw_tables(snapshot(manager)))
print(f"free blocks: {manager.num_free}")

assert manager.table(0).physical_blocks == (7, 1, 3, 5)
assert manager.table(1).physical_blocks == (0, 2, 4)
manager.check()

# %% [markdown]
# They lie mixed, in whatever order they were taken. It costs nothing: no request has to be next to
# itself. There is no external fragmentation either, since every free block is as good as any other.
#
# When a request ends, its blocks go back at once, and the next one takes them.

# %%
manager.free(0)
manager.grow(2, 5)
print(draw_pool(snapshot(manager)))
assert manager.num_free == 8 - 3 - 2

# %% [markdown]
# And when there is not enough? `grow` takes all the blocks that it needs, or none. A sequence that
# had got only a part would hold memory and could not run.

# %%
before = manager.table(1).entries()
try:
    manager.grow(1, 30)
except OutOfBlocks as error:
    print(f"OutOfBlocks: {error}")
else:
    raise AssertionError("five blocks more are needed, and three are free")
assert manager.table(1).entries() == before

# %% [markdown]
# ## Break it
#
# What would go wrong with a manager that has a bug? `check()` counts, for every block, the table
# entries that name it, and compares with the **reference count**. Here is a manager that forgets to
# give back the last block of a table.


# %%
class LeakyManager(BlockManager):
    def free(self, seq_id):
        table = self._tables.pop(seq_id)
        for block in table.physical_blocks[:-1]:
            self.allocator.free(block)


leaky = LeakyManager(num_blocks=8, block_size=4)
leaky.grow(0, 7)
leaky.free(0)
print(f"no sequence is left, and {leaky.num_free} of 8 blocks are free")
try:
    leaky.check()
except InvariantBroken as error:
    print(f"check() says: {error}")
else:
    raise AssertionError("a leak must not go unnoticed")

# %% [markdown]
# Nobody would see this leak in the answers. They stay right, while fewer and fewer requests fit
# into memory, until nothing runs. The opposite mistake is to free a block twice, so that two
# requests get the same one. That one is caught on the spot.

# %%
manager.allocator.free(manager.table(2)[0])
try:
    manager.free(2)
except DoubleFree as error:
    print(f"DoubleFree: {error}")
else:
    raise AssertionError("a block must not be freed twice")

# %% [markdown]
# Free blocks, plus blocks that tables name, are all blocks. This library calls that the
# **conservation law**, and its tests call `check()` after each of thousands of random operations.

# %% [markdown]
# ## Exercise
#
# The scheduler asks before it grows anything: how many new blocks will this take? Write the answer
# for one sequence that has `num_filled` tokens in its blocks and shall have `num_tokens`.


# %%
def my_blocks_needed(num_filled, num_tokens, block_size):
    return ...  # a number


def check(blocks_needed):
    for block_size in (1, 4, 16):
        for num_filled in range(40):
            for num_tokens in range(num_filled, 40):
                fresh = BlockManager(40, block_size)
                fresh.grow(0, num_filled)
                expected = fresh.num_blocks_needed([(0, num_tokens)])
                answer = blocks_needed(num_filled, num_tokens, block_size)
                case = (
                    f"{num_filled} to {num_tokens} tokens, block {block_size}"
                )
                assert answer == expected, f"{case}: {answer}, not {expected}"
                fresh.grow(0, num_tokens)
                assert 40 - fresh.num_free == -(-num_tokens // block_size), case
    print("right")


if my_blocks_needed(7, 8, 4) is not ...:
    check(my_blocks_needed)

# %% [markdown]
# ## Solution
#
# Rounding up, `-(-a // b)` in Python, before and after. From 7 to 8 tokens it is 2 − 2 = 0; from 8
# to 9 it is 3 − 2 = 1.


# %%
def blocks_needed(num_filled, num_tokens, block_size):
    return -(-num_tokens // block_size) - -(-num_filled // block_size)


assert blocks_needed(7, 8, 4) == 0 and blocks_needed(8, 9, 4) == 1
check(blocks_needed)

# %% [markdown]
# ## Where this is in the code
#
# `blocks/allocator.py` is the free list with its reference counts, `blocks/block_table.py` the
# table, `blocks/manager.py` the three calls. In the paper: sections 4.2 and 4.3, Figures 6 and 7.
#
# Next, 04: attention has to read keys that lie anywhere. Does it still compute the same?
