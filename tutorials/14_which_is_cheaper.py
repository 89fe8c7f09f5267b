# %% [markdown]
# # 14 · Which is cheaper?
#
# Recompute costs arithmetic and swap costs copying; block size and machine decide between the two.
#
# A request was put out and has come back. Tutorial 12 computed its tokens again, tutorial 13 copied
# its blocks out and in. The paper compares the two over block sizes (section 7.3, Figure 19). You
# do the same now, on your machine.
#
# What can be counted is counted, and asserted: tokens, blocks, bytes. Times are measured and shown,
# and nothing here depends on them: yours will differ, and a busy machine will make them jump.

# %%
import random
import time
from unittest.mock import patch

from rich import print

from minipaged import LLM
from minipaged.step import Sample, SamplingRules, SequenceWork, StepPlan
from minipaged.worker import kv_cache
from minipaged.worker import worker as worker_module
from minipaged.worker.kv_cache import bytes_per_block

NUM_TOKENS = 128  # of the request that is put out
BLOCK_SIZES = (1, 4, 16, 64)


def scattered_blocks(block_size):
    """A worker, and where one request is: device and host blocks, anywhere."""
    count = NUM_TOKENS // block_size
    llm = LLM(
        block_size=block_size,
        num_gpu_blocks_override=2 * count,
        max_model_len=NUM_TOKENS,
        max_num_batched_tokens=256,
        preemption_mode="swap",
        swap_space=0.02,
        skip_tokenizer_init=True,
    )
    rng = random.Random(block_size)
    return (
        llm.llm_engine.worker,
        tuple(rng.sample(range(2 * count), count)),
        tuple(rng.sample(range(count), count)),
    )


# %% [markdown]
# ## Predict
#
# A request of 128 tokens. One block size after another: 1, 4, 16, 64. How does each of these
# change, if at all?
#
# * the tokens that recompute feeds
# * the bytes that swapping moves
# * the number of block copies that swapping makes
# * the time of recomputing; the time of swapping

# %% [markdown]
# ## Run
#
# Three plans, handed to a worker by hand. The first computes 128 tokens in one step. The second
# copies blocks to the host, the third copies them back.


# %%
def plans(device, host):
    recompute = SequenceWork(
        seq_id=0,
        token_ids=(1,) * NUM_TOKENS,
        start=0,
        block_table=device,
        table_version=0,
    )
    next_token = Sample(
        row=0, draws=((0, 0),), rules=SamplingRules(temperature=0.0)
    )
    return (
        StepPlan(0, work=(recompute,), sampling=(next_token,)),
        StepPlan(
            1,
            work=(),
            sampling=(),
            swap_out=tuple(zip(device, host, strict=True)),
        ),
        StepPlan(
            2,
            work=(),
            sampling=(),
            swap_in=tuple(zip(host, device, strict=True)),
        ),
    )


def milliseconds(worker, plan):
    """The best of two, after one to warm up."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        worker.execute(plan)
        times.append(time.perf_counter() - begin)
    return 1000 * min(times[1:])


print(
    "block size   tokens fed   block copies   MiB moved   "
    "recompute   swap out + in"
)
moved_bytes, recompute_ms = {}, {}
for block_size in BLOCK_SIZES:
    worker, device, host = scattered_blocks(block_size)
    recompute, out, back = plans(device, host)
    num_copies = len(out.swap_out) + len(back.swap_in)
    moved = moved_bytes[block_size] = num_copies * bytes_per_block(
        worker.config, block_size, worker.dtype
    )
    recompute_ms[block_size] = milliseconds(worker, recompute)
    swap_ms = milliseconds(worker, out) + milliseconds(worker, back)
    print(
        f"{block_size:10} {recompute.num_tokens:12} {num_copies:14}"
        f" {moved / 2**20:11.1f}"
        f" {recompute_ms[block_size]:8.0f} ms {swap_ms:12.1f} ms"
    )
    assert recompute.num_tokens == NUM_TOKENS
    assert num_copies == 2 * NUM_TOKENS // block_size

# a token: keys and values, 30 layers, 3 heads of 64 numbers of 4 bytes
assert set(moved_bytes.values()) == {2 * NUM_TOKENS * 2 * 30 * 3 * 64 * 4}

# %% [markdown]
# ## What it means
#
# The work of recomputing does not know about blocks: 128 tokens are 128 tokens. Neither do the
# bytes of swapping. What changes with the block size is the *number of copies*, 256 for blocks of
# one token and 4 for blocks of 64.
#
# Within one machine's memory a copy costs little, so swapping looks far better here at every block
# size. Over the bus between a GPU and its host, each small copy has a price of its own. The paper
# found swapping too slow for small blocks, recomputing better there, and the two comparable from 16
# to 64 tokens.
#
# Blocks of our pool lie side by side in each layer's tensor, so the worker copies all of them with
# one indexed operation for each tensor: 30 layers, keys and values.

# %% [markdown]
# ## Break it
#
# Let it copy block by block instead, as one does over a bus when blocks lie scattered. How many
# operations are there now, and what do they cost?

# %%
batched = kv_cache.copy_blocks
copy_one_tensor = kv_cache._copy


def one_by_one(source, target, pairs):
    for pair in pairs:
        batched(source, target, (pair,))


def count_operations(worker, plan):
    with patch.object(kv_cache, "_copy", side_effect=copy_one_tensor) as copy:
        worker.execute(plan)
    return copy.call_count


for block_size in BLOCK_SIZES:
    worker, device, host = scattered_blocks(block_size)
    _, out, _ = plans(device, host)
    together, quick = count_operations(worker, out), milliseconds(worker, out)
    with patch.object(worker_module, "copy_blocks", one_by_one):
        apart, slow = count_operations(worker, out), milliseconds(worker, out)
    print(
        f"block size {block_size:2}: {together} operations, {quick:6.1f} ms;"
        f" one by one {apart:4}, {slow:6.1f} ms"
    )
    assert together == 2 * worker.config.num_layers
    assert apart == together * NUM_TOKENS // block_size

# %% [markdown]
# The bytes are the same in all eight cases. With one operation for each block, small blocks are
# slow even here: that is the left side of the paper's figure.

# %% [markdown]
# ## Exercise
#
# Take the price of single copies away: blocks are large enough. Then both ways cost something for
# each token.
#
# * recompute: one token's share of a prefill. A machine prefills some number of tokens in a second.
# * swap: one token's bytes, twice over the bus, which carries some number of bytes in a second.
#
# At which bandwidth do they cost the same? Write it as a formula.


# %%
def my_break_even(bytes_per_token, prefill_tokens_per_second):
    """The bandwidth, in bytes a second, above which swapping is quicker."""
    return ...


def check(break_even):
    for size, speed in ((46_080, 200), (819_200, 5_000)):
        bandwidth = break_even(size, speed)
        tokens = 1_000
        swap_seconds = 2 * tokens * size / bandwidth
        recompute_seconds = tokens / speed
        ratio = swap_seconds / recompute_seconds
        assert abs(ratio - 1) < 1e-9, (
            f"at {bandwidth:,} bytes/s swapping takes {ratio:.2f} times as long"
        )
    print("right")


if my_break_even(1, 1) is not ...:
    check(my_break_even)

# %% [markdown]
# ## Solution


# %%
def break_even(bytes_per_token, prefill_tokens_per_second):
    return 2 * bytes_per_token * prefill_tokens_per_second


check(break_even)
speed = NUM_TOKENS / recompute_ms[16] * 1000
print(
    f"this machine prefills about {speed:,.0f} tokens/s:"
    f" swap above {break_even(46_080, speed) / 2**20:,.0f} MiB/s"
)
opt_13b = 800 * 1024  # bytes of one token of OPT-13B (paper, section 3)
for speed in (2_000, 10_000):
    print(
        f"OPT-13B at {speed:6,} tokens/s:"
        f" swap above {break_even(opt_13b, speed) / 1e9:.1f} GB/s"
    )

assert break_even(opt_13b, 10_000) == 5 * break_even(opt_13b, 2_000)

# %% [markdown]
# The length of the request has dropped out: a long one costs more either way, in the same
# proportion. (Attention makes very long prefills somewhat dearer than that.) What stays is the
# machine: where computing becomes faster and the bus does not, recomputing wins. Tutorial 19 tells
# what vLLM made of that.

# %% [markdown]
# ## Where this is in the code
#
# `python -m minipaged.bench preemption` measures with 512 tokens and more block sizes; with a GPU,
# the bus is a real one. `worker/kv_cache.py` is the batched copy. In the paper: section 7.3 and,
# for batched copies, 5.1.
#
# Next, 15: blocks that nobody needs any more, and why they are kept.
