# %% [markdown]
# # 02 · Blocks and addresses
#
# A token's position becomes a block and an offset, and the block table turns that into a place in
# the pool.
#
# The KV cache is cut into **blocks**, runs of `block_size` **slots**. A slot holds the key and the
# value of one token. A sequence gets blocks wherever one is free, and its **block table** lists
# them in the order of its tokens:
#
# ```text
# tokens of the sequence   Four score and seven │ years ago our
# logical block                      0          │       1
# block table                        7          │       1
# ```
#
# Finding a token is a division with remainder, as in an operating system's page table:
#
# ```text
# logical block  = position // block_size
# offset         = position %  block_size
# physical block = table[logical block]
# slot           = physical block * block_size + offset
# ```

# %% [markdown]
# ## Predict
#
# Blocks have four slots, and the table of a sequence is `(7, 1, 3)`. In which slot of the pool are
# the key and the value of the token at position 0? At position 5? At position 9?

# %% [markdown]
# ## Run
#
# In each step the worker turns a plan into tensors. `RaggedBatch` is where positions become slots.
# We ask it about a sequence of ten tokens; the token ids do not matter here.

# %%
import torch
from rich import print

from minipaged.config import ModelConfig
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer
from minipaged.show import draw_tables, make_snapshot
from minipaged.step import SequenceWork
from minipaged.worker.kv_cache import bytes_per_block


def slots_of(block_table, num_tokens, start=0, block_size=4):
    work = SequenceWork(
        0, (0,) * num_tokens, start, block_table, table_version=0
    )
    return RaggedBatch.build([work], block_size, "cpu").slots.tolist()


print(draw_tables(make_snapshot(4, 8, {0: [(7, 4), (1, 4), (3, 2)]})))
slots = slots_of((7, 1, 3), num_tokens=10)
print("position", *(f"{position:>3}" for position in range(10)))
print("slot    ", *(f"{slot:>3}" for slot in slots))

assert (slots[0], slots[5], slots[9]) == (28, 5, 13)
assert slots == [(7, 1, 3)[p // 4] * 4 + p % 4 for p in range(10)]

# %% [markdown]
# Neighbours inside a block are neighbours in memory. At a block's border the address jumps, and
# nobody minds.
#
# When a sequence grows by one token, nothing that it has is moved: one more position, one more
# slot.

# %%
[next_slot] = slots_of((7, 1, 3), num_tokens=1, start=10)
print(f"position 10 goes into slot {next_slot}")
assert next_slot == 3 * 4 + 2

# %% [markdown]
# ## A real pool
#
# One layer's cache is two tensors, keys and values, of shape `[num_blocks, block_size,
# num_kv_heads, head_dim]`. Writing is one scatter to slots. Here every key is its own position, so
# that we see where it went. Slots that nobody has written hold NaN, "not a number".

# %%
pool = torch.full((8, 4, 1, 1), float("nan"))
layer = KVLayer(key=pool, value=pool.clone())
positions = torch.arange(10.0).view(10, 1, 1)  # [tokens, KV heads, head_dim]
layer.write(positions, positions, torch.tensor(slots))
for block in range(8):
    keys = layer.key[block].flatten().tolist()
    print(f"block {block}  ", *(f"{key:>5.0f}" for key in keys))

assert layer.key[7].flatten().tolist() == [0, 1, 2, 3]
assert layer.key[1].flatten().tolist() == [4, 5, 6, 7]
assert layer.key[3].flatten().tolist()[:2] == [8, 9]
assert int(layer.key.isnan().sum()) == 8 * 4 - 10

# %% [markdown]
# To read the sequence, index the first axis with its table. The result is contiguous again, in the
# right order.

# %%
gathered = layer.key[[7, 1, 3]].flatten()[:10]
assert gathered.tolist() == list(range(10))
gathered

# %% [markdown]
# ## Predict
#
# A block number means the same block in every layer, so one table serves them all. How many bytes
# is a block of 16 tokens for OPT-13B: 40 layers, 40 heads of 128 numbers, two bytes each? And for
# the small model of this repository: 30 layers, 3 KV heads of 64 numbers, four bytes each?

# %% [markdown]
# ## Run

# %%
opt_13b = ModelConfig(50272, 5120, 20480, 40, 40, 40, 128, 2048)
smollm2 = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192)
opt_block = bytes_per_block(opt_13b, 16, torch.float16)
small_block = bytes_per_block(smollm2, 16, torch.float32)
print(f"OPT-13B:      {opt_block:>10,} bytes, {opt_block // 16:>7,} a token")
print(
    f"SmolLM2-135M: {small_block:>10,} bytes, {small_block // 16:>7,} a token"
)

assert opt_block == 16 * 800 * 1024  # 800 KB a token (paper, section 3)
assert small_block == 16 * (2 * 30 * 3 * 64 * 4)

# %% [markdown]
# The small model has nine query heads and only three KV heads: three queries share a key
# (grouped-query attention). That alone makes its cache three times smaller.

# %% [markdown]
# ## Break it
#
# An operating system has hardware that notices a wrong page. Here nobody notices. What happens if
# two entries of the table change places?

# %%
wrong = layer.key[[1, 7, 3]].flatten()[:10]
print(f"table (7, 1, 3) reads {gathered.int().tolist()}")
print(f"table (1, 7, 3) reads {wrong.int().tolist()}")
assert wrong.tolist() != list(range(10))
assert sorted(wrong.tolist()) == list(range(10))

# %% [markdown]
# No error, only another order. And a wrong entry is worse for a writer: a sequence that writes
# through a table which names somebody else's block destroys his tokens.

# %%
stranger = torch.full((1, 1, 1), 99.0)
layer.write(stranger, stranger, torch.tensor(slots_of((2, 1), 1, start=5)))
damaged = layer.key[[7, 1, 3]].flatten()[:10]
print(f"after a stranger's write: {damaged.int().tolist()}")
assert damaged.tolist() == [0, 1, 2, 3, 4, 99, 6, 7, 8, 9]

# %% [markdown]
# All safety is in the tables. So they are kept by one class, which has a `check()`, and all else in
# this library only reads them. The next tutorial is about that class.

# %% [markdown]
# ## Exercise
#
# The way back: given a slot of the pool, which position of the sequence is it? The tuple's method
# `index` finds a block's place in the table.


# %%
def my_position(slot, block_table, block_size):
    return ...  # a number


def check(position_of):
    for table, size in (((7, 1, 3), 4), ((2, 0, 5), 16), ((4, 3, 9, 8), 1)):
        slots = slots_of(table, len(table) * size, block_size=size)
        found = [position_of(slot, table, size) for slot in slots]
        assert found == list(range(len(found))), (
            f"the slots {slots} became {found}"
        )
    print("right")


if my_position(28, (7, 1, 3), 4) is not ...:
    check(my_position)

# %% [markdown]
# ## Solution


# %%
def position_of(slot, block_table, block_size):
    physical_block, offset = divmod(slot, block_size)
    return block_table.index(physical_block) * block_size + offset


check(position_of)

# %% [markdown]
# ## Where this is in the code
#
# `model/batch.py` makes slots of positions; `model/kv_layer.py` writes; `worker/kv_cache.py`
# allocates the tensors. In the paper: section 4.2.
#
# Next, 03: who decides which blocks a table names?
