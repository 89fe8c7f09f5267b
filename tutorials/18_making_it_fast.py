# %% [markdown]
# # 18 · Making it fast
#
# A decode step does little arithmetic on many bytes, so fast means to move each byte once.
#
# To make one token, a model multiplies a vector with every weight that it has. Each weight is read
# from memory for one multiplication. A processor can do many more than that in the time of the
# reading. So in a decode step, *bytes* are what you pay for, and this tutorial counts them: what a
# step has to move, what this library's eager step moves on top of that, and what a compiler takes
# away.

# %%
import dataclasses
import inspect
import time
from collections import Counter

import torch
from rich import print
from rich.syntax import Syntax
from torch.utils._python_dispatch import TorchDispatchMode

from minipaged import LLM
from minipaged.loading import read_weights
from minipaged.model.attention import make_backend
from minipaged.model.attention.compiled import TILE, attend, attend_tiles
from minipaged.model.batch import RaggedBatch
from minipaged.step import Sample, SamplingRules, SequenceWork, StepPlan
from minipaged.worker.kv_cache import bytes_per_block

COMPILE = False  # True: also compile, and compare (half a minute or more)

llm = LLM(
    block_size=16,
    num_gpu_blocks_override=256,
    max_model_len=512,
    skip_tokenizer_init=True,
)
worker = llm.llm_engine.worker
torch.manual_seed(0)
with torch.inference_mode():
    for layer in worker.cache.layers:  # any keys and values will do
        for tensor in layer:
            tensor.normal_()

# %% [markdown]
# ## Predict
#
# The default model has 135 million weights of four bytes. A token in the cache takes 46,080 bytes.
#
# * How many bytes must a step read that makes one token for *one* sequence of 100 tokens? And for
# *eight* of them?
# * How many bytes is that for each token made?

# %% [markdown]
# ## Run


# %%
def rows(context_lens):
    """A decode for each context length, each in blocks of its own."""
    work, first = [], 0
    for seq_id, length in enumerate(context_lens):
        num_blocks = -(-length // 16)
        table = tuple(range(first, first + num_blocks))
        work.append(SequenceWork(seq_id, (seq_id + 1,), length - 1, table, 0))
        first += num_blocks
    return tuple(work)


def decode(context_lens):
    greedy = SamplingRules(temperature=0.0)
    samples = tuple(
        Sample(i, ((0, 0),), greedy) for i in range(len(context_lens))
    )
    return StepPlan(0, rows(context_lens), samples)


def milliseconds(run):
    """The best of three, after one to warm up."""
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1000 * min(times[1:])


num_weights = sum(weight.numel() for _, weight in read_weights(worker.path))
weight_bytes = num_weights * worker.dtype.itemsize
token_bytes = bytes_per_block(worker.config, 1, worker.dtype)
per_token = {}
for batch_size in (1, 8, 32):
    kv_bytes = batch_size * 100 * token_bytes
    per_token[batch_size] = (weight_bytes + kv_bytes) / batch_size
    plan = decode([100] * batch_size)
    ms = milliseconds(lambda plan=plan: worker.execute(plan))
    print(
        f"batch {batch_size:2}: weights {weight_bytes / 1e6:.0f} MB"
        f" + KV {kv_bytes / 1e6:5.1f} MB,"
        f" {per_token[batch_size] / 1e6:5.1f} MB for each token; {ms:4.0f} ms"
    )

assert token_bytes == 46_080
assert round(num_weights / 1e6) == 135
assert per_token[8] < per_token[1] / 6

# %% [markdown]
# The weights are read once for the whole batch. That is why batching pays, and why the paper fights
# for every block of memory: more sequences in memory are a larger batch.
#
# (The time does not shrink as far as the bytes do: on a processor with few cores the arithmetic of
# a batch soon counts too. A GPU computes so much faster than it reads that it takes many more
# sequences before that happens.)

# %% [markdown]
# ## Where the time goes
#
# A clock around each kind of module. The parts of attention that hold weights count as products;
# `attention` is what reads the paged keys and values.

# %%
seconds = Counter()


def timed(name, run):
    def wrapper(*args):
        begin = time.perf_counter()
        result = run(*args)
        seconds[name] += time.perf_counter() - begin
        return result

    return wrapper


def part_of(name):
    last = name.split(".")[-1]
    if last.endswith("_proj"):
        return "products"
    if "norm" in last:
        return "norms"
    return "logits" if last == "lm_head" else None


wrapped = [
    (module, part_of(name))
    for name, module in worker.model.named_modules()
    if part_of(name)
]
wrapped.append((worker.backend, "attention"))
for module, name in wrapped:
    module.forward = timed(name, module.forward)

plan = decode([100] * 8)
worker.execute(plan)
seconds.clear()
begin = time.perf_counter()
worker.execute(plan)
whole = time.perf_counter() - begin
seconds["the rest"] = whole - sum(seconds.values())
for module, _ in wrapped:
    del module.forward  # the method of its class again

for name, spent in seconds.most_common():
    print(f"{name:10} {spent / whole:4.0%} {'▮' * round(40 * spent / whole)}")

assert set(seconds) == {"products", "logits", "norms", "attention", "the rest"}

# %% [markdown]
# The products are the weights, and they are read once: there is little to gain. Norms, rotations
# and the rest are many small operations on small tensors, each with a price of its own. And
# attention moves more bytes than it has to.

# %% [markdown]
# ## Predict
#
# One attention layer, twelve decodes with contexts of different lengths. It has to read each key
# and each value once.
#
# The default backend, `gather`, is made of torch's ready parts: it collects the keys and values of
# a group of rows in one place (`index_select`), then calls torch's attention on them. How many
# times does it move each key?

# %% [markdown]
# ## Run
#
# Every operation of torch passes through a "dispatch mode". Ours counts operations, and the bytes
# of the new tensors that they write. (Views write nothing, and fresh memory is not written yet.)


# %%
class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num_operations = 0
        self.written = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            self.num_operations += 1
            tensors = result if isinstance(result, (tuple, list)) else (result,)
            self.written += sum(
                t.nbytes for t in tensors if isinstance(t, torch.Tensor)
            )
        return result


lengths = [17 * n for n in range(1, 13)]
batch = RaggedBatch.build(rows(lengths), 16, "cpu")
layer = worker.cache.layers[0]
query = torch.randn(
    len(lengths), worker.config.num_heads, worker.config.head_dim
)
kv_bytes = sum(lengths) * token_bytes // worker.config.num_layers


@torch.inference_mode()
def run(name):
    """One layer's attention, counted. `compiled` runs as plain Python."""
    backend = make_backend(name)
    metadata = backend.prepare(batch)
    keys, values = layer.key.flatten(0, 1), layer.value.flatten(0, 1)
    with Counted() as counted:
        if name == "compiled":
            output = attend(query, keys, values, metadata)
        else:
            output = backend.forward(query, layer, metadata)
    return output, counted


outputs, counts = {}, {}
for name in ("reference", "gather", "compiled"):
    outputs[name], counts[name] = run(name)
    print(
        f"{name:10} {counts[name].num_operations:5} operations,"
        f" {counts[name].written / 1024:6.0f} KiB written"
    )
print(
    f"keys and values of the contexts: {kv_bytes / 1024:.0f} KiB;"
    f" output: {query.nbytes / 1024:.0f} KiB"
)

assert torch.allclose(outputs["gather"], outputs["reference"], atol=1e-5)
assert torch.allclose(outputs["compiled"], outputs["reference"], atol=1e-5)
assert counts["gather"].written > kv_bytes  # a copy, and padding
assert counts["gather"].num_operations < counts["reference"].num_operations / 10
assert counts["compiled"].written > 2 * counts["gather"].written

# %% [markdown]
# `reference` is the paper's equation, block by block: a great many small operations. `gather` has
# few, but it reads each key from the pool, writes it to a buffer, and reads it again: three times,
# where once would do.
#
# And the third one? As plain Python it is worse than `gather`: it writes every product of a query
# with a key as a tensor of its own. Nobody should run it like that. Here it is.

# %%
code = inspect.getsource(attend_tiles)
print(Syntax(code, "python", background_color="default", word_wrap=True))

# %% [markdown]
# ## What it means
#
# It was written for a compiler. Look at the line with `.sum(-1)`: query times key, summed up.
# `torch.compile` makes one loop of it, in which a key is loaded from its slot in the pool,
# multiplied and added to a running sum in a register. The big product is never a tensor, and the
# gathered keys `key[tiles.slots]` are never one either: they are an address.
#
# What a fused loop has to move is what the function takes and what it gives: keys and values once,
# the output once, and small things for each tile. The rest of the bytes that we counted is what
# fusing saves.

# %%
saved = counts["compiled"].written - query.nbytes
print(f"intermediate tensors that fusing avoids: up to {saved / 1024:.0f} KiB,")
print(f"{saved / kv_bytes:.1f} times the keys and values themselves")

assert saved > kv_bytes

# %% [markdown]
# If you have a C++ compiler and half a minute, set `COMPILE = True` in the first cell. Then the
# same function is compiled, and compared with `gather`.

# %%
if COMPILE:
    with torch.inference_mode():
        for name in ("gather", "compiled"):
            backend = make_backend(name)
            metadata = backend.prepare(batch)
            result = backend.forward(query, layer, metadata)  # compiles
            assert torch.allclose(result, outputs["reference"], atol=1e-5)
            ms = milliseconds(
                lambda b=backend, m=metadata: b.forward(query, layer, m)
            )
            print(f"{name:10} {ms:.2f} ms")
else:
    print("not compiled")

# %% [markdown]
# A whole model is compiled by `LLM(enforce_eager=False)`: one decoder layer becomes one graph,
# which runs for all thirty, and the norms, rotations and residuals are fused as well.

# %% [markdown]
# ## Break it
#
# Fast code likes equal shapes, so contexts are cut into tiles of 32 tokens, and the last tile of a
# row is filled up. The padding has weight zero, since its scores are masked to minus infinity. So
# does it matter which slots it reads?
#
# The rule is that padding repeats the row's own last token. Let it point at a slot that nobody has
# written. We put a NaN there, as memory may hold anything.

# %%
metadata = make_backend("compiled").prepare(batch)
tiles = metadata.tiles
is_padding = torch.arange(TILE) >= tiles.filled[:, None]
unwritten = 256 * 16 - 1  # the pool's last slot
careless = dataclasses.replace(
    tiles, slots=tiles.slots.masked_fill(is_padding, unwritten)
)

with torch.inference_mode():
    keys, values = layer.key.flatten(0, 1), layer.value.flatten(0, 1)
    values[unwritten] = float("nan")
    fine = attend_tiles(query, keys, values, tiles)
    broken = attend_tiles(query, keys, values, careless)
hit = broken.isnan().flatten(1).any(1)
print(f"rows that became NaN: {int(hit.sum())} of {len(lengths)}")

assert torch.allclose(fine, outputs["reference"], atol=1e-5)
assert hit.all()  # zero times NaN is NaN

# %% [markdown]
# A weight of zero does not protect from NaN. Such a bug sleeps as long as memory is clean, and
# shows itself on the day on which it is not. The tests of this library fill every unused slot with
# NaN.

# %% [markdown]
# ## Exercise
#
# Suppose that a machine reads `bandwidth` bytes in a second and that arithmetic costs nothing. How
# many tokens a second can it decode at most, for a batch of sequences with `context` tokens each?
# Weights are read once in a step, keys and values once for each sequence. Each sequence gets one
# token.


# %%
def my_bound(bandwidth, batch_size, context):
    return ...


def check(bound):
    for batch_size, context in ((1, 100), (8, 100), (64, 1000)):
        tables = [row.block_table for row in rows([context] * batch_size)]
        empty = batch_size * (-context % 16)
        filled = sum(len(table) for table in tables) * 16 - empty
        step = (weight_bytes + filled * token_bytes) / 10e9  # at 10 GB/s
        said = bound(10e9, batch_size, context)
        assert abs(said * step / batch_size - 1) < 1e-9, (
            f"batch {batch_size}, context {context}: "
            f"a step takes {step * 1e3:.1f} ms "
            f"and makes {batch_size} tokens; you say {said:.1f} tokens a second"
        )
        print(
            f"batch {batch_size:2}, context {context:4}:"
            f" {said:6.0f} tokens a second"
        )


if my_bound(1, 1, 1) is not ...:
    check(my_bound)

# %% [markdown]
# ## Solution


# %%
def bound(bandwidth, batch_size, context):
    step_bytes = weight_bytes + batch_size * context * token_bytes
    return batch_size * bandwidth / step_bytes


check(bound)

# %% [markdown]
# A bound like this tells when to stop. What runs at half of it has a factor of two left, and no
# more.

# %% [markdown]
# ## Where this is in the code
#
# `model/attention/gather.py` and `model/attention/compiled.py`: the two backends.
# `model/compile.py`: the whole layer as one graph. In the paper: section 5.1, which fuses the same
# things by hand.
#
# Next, 19: what vLLM does differently today.
