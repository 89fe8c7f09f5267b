# %% [markdown]
# # 04 · Attention through the table
#
# PagedAttention reads keys and values block by block, and computes what attention over one long
# tensor computes.
#
# Attention compares a token's query with the keys of all tokens before it, makes weights of the
# scores (softmax: they sum to one), and returns the weighted sum of the values. For the paper it
# was written over blocks (equation 4). With K_j and V_j the keys and values of block j:
#
# ```text
# A_j = exp(q · K_j / sqrt(d)) / (sum of the same over all blocks)
# o   = A_0 · V_0 + A_1 · V_1 + ...
# ```
#
# It is the same sum, grouped by block.

# %% [markdown]
# ## Predict
#
# Ten tokens lie in three blocks of four, in the order 7, 1, 3. We compute attention through the
# table, and then the ordinary way, over a tensor of ten keys in a row. How far will the two results
# be apart? And what will change if the same tokens lie in blocks 0, 5, 2 instead?

# %% [markdown]
# ## Run
#
# First the ordinary way: torch's own attention, on random queries, keys and values of four heads.

# %%
import torch
import torch.nn.functional as F
from rich import print

from minipaged.model.attention.reference import paged_attention
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer
from minipaged.step import SequenceWork

torch.manual_seed(0)
num_tokens, num_heads, head_dim, block_size = 10, 4, 16, 4
query = torch.randn(1, num_heads, head_dim)  # the newest token's
key = torch.randn(num_tokens, num_heads, head_dim)
value = torch.randn(num_tokens, num_heads, head_dim)


def heads_first(tensor):
    return tensor.transpose(0, 1)


contiguous = heads_first(
    F.scaled_dot_product_attention(*map(heads_first, (query, key, value)))
)
print(f"one output vector for each head: {tuple(contiguous.shape)}")

# %% [markdown]
# Now the paged way. The pool is full of NaN, so that a read of a slot that is not ours would show:
# a sum with NaN in it is NaN.


# %%
def store(block_table):
    """A pool of eight blocks that holds our tokens where the table says."""
    layer = KVLayer(
        *torch.full((2, 8, block_size, num_heads, head_dim), torch.nan)
    )
    work = SequenceWork(0, (0,) * num_tokens, 0, tuple(block_table), 0)
    batch = RaggedBatch.build([work], block_size, "cpu")
    layer.write(key, value, batch.slots)
    return layer


layer = store([7, 1, 3])
paged = paged_attention(query, layer, [7, 1, 3], context_len=num_tokens)
elsewhere = paged_attention(query, store([0, 5, 2]), [0, 5, 2], num_tokens)
print(f"largest difference to torch: {(paged - contiguous).abs().max():.1e}")
print(f"largest difference elsewhere: {(elsewhere - paged).abs().max():.1e}")

assert (paged - contiguous).abs().max() < 1e-6
assert torch.equal(elsewhere, paged)

# %% [markdown]
# The difference to torch is rounding: the same numbers, added in another order. Where the blocks
# lie makes no difference at all, not in the last bit, since the same numbers are added in the same
# order.

# %% [markdown]
# ## How can it work without all scores at once?
#
# Softmax divides by a sum over all tokens, and that sum is known only after the last block. The
# trick is to keep a running sum, and the largest score so far, and to rescale when a larger one
# comes. You find it in twenty lines in `model/attention/reference.py`. At any block's border, what
# has been summed is the attention over the tokens so far:

# %%
for context in (4, 8, 10):
    so_far = paged_attention(query, layer, [7, 1, 3], context)
    expected = heads_first(
        F.scaled_dot_product_attention(
            heads_first(query),
            heads_first(key[:context]),
            heads_first(value[:context]),
        )
    )
    print(
        f"after {context:>2} tokens the first number is {so_far[0, 0, 0]:+.4f}"
    )
    assert (so_far - expected).abs().max() < 1e-6

# %% [markdown]
# ## Predict
#
# Three mistakes. Which of them change the result for this one query?
#
# 1. The table says 1, 7, 3 where it should say 7, 1, 3: two full blocks have changed places.
# 2. The table says 7, 3, 1: the partial block stands in the middle.
# 3. The context is said to be 11 tokens long, and there are 10.

# %% [markdown]
# ## Break it

# %%
swapped_full = paged_attention(query, layer, [1, 7, 3], num_tokens)
swapped_partial = paged_attention(query, layer, [7, 3, 1], num_tokens)
too_long = paged_attention(query, layer, [7, 1, 3], num_tokens + 1)
print(f"1. {(swapped_full - contiguous).abs().max():.1e}")
print(f"2. {(swapped_partial - contiguous).abs().max():.1e}")
print(f"3. {(too_long - contiguous).abs().max():.1e}")

assert (swapped_full - contiguous).abs().max() < 1e-6
assert swapped_partial.isnan().all() and too_long.isnan().all()

# %% [markdown]
# The first is harmless. A weighted sum does not care about order, and a token's position is not
# where it lies: Llama turns each key by an angle that depends on its position, before it is
# written. The second and the third read slots that hold nothing. Without the NaN they would hold
# some other request's old tokens, and the result would look like any other.
#
# So the first mistake can hide. It shows as soon as several queries run at once, as in a prompt,
# because then each may see only the tokens before it, and who is before whom is told by the table.

# %%
queries = torch.randn(
    10, num_heads, head_dim
)  # a prompt: a query for each token
right = paged_attention(queries, layer, [7, 1, 3], num_tokens)
wrong = paged_attention(queries, layer, [1, 7, 3], num_tokens)
differs = (right - wrong).abs().amax(dim=(1, 2)) > 1e-6
print(
    f"queries that see something else: {differs.nonzero().flatten().tolist()}"
)

assert differs.tolist() == [True] * 7 + [False] * 3

# %% [markdown]
# Query 7 sees all of both blocks, and for those after it only the third block grows.

# %% [markdown]
# ## Exercise
#
# Which slots of the pool does `paged_attention(query, layer, [7, 1, 3], context_len=6)` read? List
# their numbers. The check spoils all other slots with NaN: nothing may change. Then it spoils each
# of yours: each must matter.

# %%
my_slots = ...  # a list of numbers; block b has the slots 4b to 4b + 3


def spoil(slots):
    """Our tokens once more, with NaN in some slots."""
    spoilt = store([7, 1, 3])
    for tensor in spoilt:
        tensor.flatten(0, 1)[slots] = torch.nan
    return paged_attention(query, spoilt, [7, 1, 3], context_len=6)


def check(slots):
    expected = paged_attention(query, layer, [7, 1, 3], context_len=6)
    others = [slot for slot in range(8 * block_size) if slot not in slots]
    assert torch.equal(spoil(others), expected), "it reads more than these"
    for slot in slots:
        assert spoil([slot]).isnan().any(), f"it does not read slot {slot}"
    print(f"right: {len(slots)} of {8 * block_size} slots are read")


if my_slots is not ...:
    check(my_slots)

# %% [markdown]
# ## Solution
#
# Positions 0 to 3 are block 7, positions 4 and 5 the first half of block 1. Block 3 is in the
# table, and is not read.

# %%
check([28, 29, 30, 31, 4, 5])

# %% [markdown]
# ## Where this is in the code
#
# `model/attention/reference.py` is this equation, and the oracle for the faster ways beside it
# (`gather.py`). In the paper: section 4.1.
#
# Next, 05: a real model, with you as its scheduler.
