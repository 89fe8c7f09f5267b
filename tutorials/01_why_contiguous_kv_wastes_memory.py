# %% [markdown]
# # 01 · Why contiguous KV wastes memory
#
# A request's future length is unknown, so memory that must lie in one piece is mostly reserved and
# empty.
#
# To write its next token, a language model attends to all tokens before it. Their keys and values
# are kept in memory, the **KV cache**. It grows by one token a step, and nobody knows when it will
# stop.
#
# Operating systems met this problem long ago, with processes whose memory grows:
#
# | operating system | serving a model |
# |---|---|
# | a process | a request |
# | its memory, which grows | its KV cache, which grows |
# | a segment: one piece, reserved for the largest size | contiguous KV: one piece, for the longest answer |
# | pages: small pieces, anywhere, taken when needed | **blocks** of tokens, anywhere, taken when needed |
#
# The paper ([Kwon et al., 2023](https://arxiv.org/abs/2309.06180)) is the right column of the last
# line. This tutorial measures what the line before it costs.

# %% [markdown]
# ## How large is one token?
#
# A token leaves one key and one value in every layer. The paper's example is OPT-13B: 40 layers,
# vectors of 5,120 numbers, two bytes for each number. The library says what a block of one token
# takes.

# %%
import random

import torch
from rich import print

from minipaged.blocks.manager import BlockManager
from minipaged.config import ModelConfig, RopeConfig
from minipaged.errors import OutOfBlocks
from minipaged.show import draw_pool, make_snapshot
from minipaged.worker.kv_cache import bytes_per_block

opt_13b = ModelConfig(
    vocab_size=50272,
    hidden_size=5120,
    intermediate_size=20480,
    num_layers=40,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    max_position=2048,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    tie_word_embeddings=True,
)
token_bytes = bytes_per_block(opt_13b, block_size=1, dtype=torch.float16)
kv_memory = (
    12 * 2**30
)  # what 26 GB of weights leave on the paper's GPU (Table 1)
num_slots = kv_memory // token_bytes
print(f"one token: {token_bytes // 1024} KB")
print(f"a request of 2,048 tokens: {2048 * token_bytes / 2**30:.1f} GB")
print(f"12 GB have slots for {num_slots:,} tokens")

assert (
    token_bytes == 2 * 5120 * 40 * 2 == 800 * 1024
)  # "800 KB" (paper, section 3)
assert round(num_slots / 1000, 1) == 15.7  # "15.7K" (paper, Table 1)

# %% [markdown]
# ## Predict
#
# A serving system before the paper reserves 2,048 slots for every request, since an answer may
# become that long. The average conversation of the paper's workload has a prompt of 161 tokens and
# an answer of 338.
#
# How many requests fit at a time? And of all slots, what part holds a token? Write down two
# numbers.

# %% [markdown]
# ## Run
#
# No second program is needed for the old way. It is this library's block manager with a block as
# long as the longest request: a block is then the reservation.
#
# We fill the pool with requests that we catch in the middle of their work: a prompt, and a part of
# the answer. Lengths are drawn with the paper's averages. (A long answer is more often caught than
# a short one, in proportion to its length.)


# %%
def requests_at_work(seed):
    """(tokens now, tokens in the end) of requests that are seen at some moment of their lives."""
    rng = random.Random(seed)
    while True:
        prompt = rng.expovariate(1 / 161.31)
        answer = rng.gammavariate(
            2, 337.99
        )  # exponential lengths, each counted as often as it is long
        if prompt + answer < 2048:
            yield (
                int(prompt + rng.random() * answer) + 1,
                int(prompt + answer) + 1,
            )


def fill_pool(block_size, seed=0):
    """Let requests in until no block is left."""
    manager = BlockManager(num_slots // block_size, block_size)
    final_lengths = []
    try:
        for number, (now, in_the_end) in enumerate(requests_at_work(seed)):
            manager.grow(number, now)
            final_lengths.append(in_the_end)
    except OutOfBlocks:
        return manager, final_lengths


def filled_part(manager):
    """Of all slots of the pool, the part that holds a token."""
    return (
        sum(table.num_filled for table in manager.tables().values()) / num_slots
    )


contiguous, _ = fill_pool(block_size=2048)
print(
    f"{len(contiguous.tables())} requests, {filled_part(contiguous):.0%} filled"
)
assert len(contiguous.tables()) == 7  # the paper measured 7.00 (Figure 13)

# %% [markdown]
# Seven, whatever their lengths: the piece decides, not the request. One draw of seven is a small
# sample, so here is the mean of 200, with the reasons for the waste, beside what the paper measured
# (Figure 2, "Orca (Max)").

# %%
stored = reserved = never = 0.0
for seed in range(200):
    manager, final_lengths = fill_pool(2048, seed)
    tables = manager.tables().values()
    for table, final in zip(tables, final_lengths, strict=True):
        stored += table.num_filled / num_slots / 200
        reserved += (final - table.num_filled) / num_slots / 200
        never += (2048 - final) / num_slots / 200
no_room = 1 - 7 * 2048 / num_slots
print("                                          here   paper")
print(f"slots that hold a token                {stored:6.1%}   20.4%")
print(f"reserved: this answer will need them   {reserved:6.1%}   13.3%")
print(f"never used by this answer              {never:6.1%}   57.3%")
print(f"too small for another piece of 2,048   {no_room:6.1%}    8.9%")

assert abs(stored - 0.204) < 0.03 and abs(reserved - 0.133) < 0.03
assert abs(never - 0.573) < 0.04 and abs(no_room - 0.089) < 0.001

# %% [markdown]
# Four fifths of the scarcest memory of the machine hold nothing. An oracle that knows every
# answer's length would not cure it: it avoids the third line, but what an answer will need later
# still waits empty. With an oracle the paper measured 38.2 %.

# %% [markdown]
# ## Predict
#
# Now the same manager with blocks of 16 tokens. A request takes a block when its last one is full.
# How many requests fit now? What part of the slots holds a token?

# %% [markdown]
# ## Run

# %%
paged, _ = fill_pool(block_size=16)
print(f"{len(paged.tables())} requests, {filled_part(paged):.1%} filled")
assert len(paged.tables()) > 4 * len(
    contiguous.tables()
)  # the paper: 30.42 against 7.00
assert filled_part(paged) > 0.95  # the paper: 96.3 %

# %% [markdown]
# This is where the speed of the paper comes from. A GPU reads the weights once a step, for all
# requests of the batch together. Four times the requests in memory are nearly four times the tokens
# for the same reading.
#
# The same at a size that can be drawn: four requests, 64 slots, a longest request of 32. `▮` holds
# a token.


# %%
def draw(block_size, lengths):
    manager = BlockManager(64 // block_size, block_size)
    for number, length in enumerate(lengths):
        try:
            manager.grow(number, length)
        except OutOfBlocks:
            print(f"no room for request {number}")
    tables = {
        number: table.entries() for number, table in manager.tables().items()
    }
    print(draw_pool(make_snapshot(block_size, manager.num_blocks, tables)))
    return len(tables)


assert draw(32, [9, 6, 13, 5]) == 2
assert draw(4, [9, 6, 13, 5]) == 4

# %% [markdown]
# ## Break it
#
# Paging helps because its pieces are small. Make them larger, step by step, and watch the gain go.

# %%
for block_size in (1, 16, 128, 512, 2048):
    fills = [fill_pool(block_size, seed)[0] for seed in range(20)]
    count = sum(len(manager.tables()) for manager in fills) / len(fills)
    part = sum(map(filled_part, fills)) / len(fills)
    print(
        f"blocks of {block_size:5,}: {count:4.1f} requests, {part:4.0%} filled"
    )
    if block_size == 16:
        small_blocks = part
assert part < 0.25 < 0.95 < small_blocks  # `part` is by now that of 2,048

# %% [markdown]
# Blocks of one token waste nothing; what is missing to 100 % is too little for one more request.
# Why not take those? Because a GPU reads long runs of memory faster than scattered tokens, and
# every block costs an entry in a table. The paper found 16 to be small enough and large enough
# (Figure 18b), and that is the default here too.

# %% [markdown]
# ## Exercise
#
# Thirty requests, blocks of 16. Each one's last block may be nearly empty. How many slots are
# wasted at the very most? Fill in the number, and give each request the length that is worst.

# %%
my_waste = ...  # slots, all 30 requests together
my_length = ...  # the tokens of each request; not more than 100


def check(waste, length):
    manager = BlockManager(983, 16)
    for number in range(30):
        manager.grow(number, length)
    taken = (manager.num_blocks - manager.num_free) * 16
    assert length <= 100, "not more than 100 tokens"
    assert taken - 30 * length == waste, f"{taken - 30 * length} are wasted"
    worst = 30 * max(16 * -(-n // 16) - n for n in range(1, 101))
    assert waste == worst, "some other length wastes more"
    print(f"right: {waste} slots, {waste / num_slots:.1%} of the pool")


if my_waste is not ...:
    check(my_waste, my_length)

# %% [markdown]
# ## Solution
#
# The worst is a last block with a single token: 15 empty slots for each request. On average about
# half a block is empty.

# %%
check(waste=30 * 15, length=16 + 1)

# %% [markdown]
# ## Where this is in the code
#
# `blocks/manager.py` is the manager that you filled. The paper tells this story in sections 1 to 3.
#
# Next, 02: when the pieces lie anywhere, how is a token found?
