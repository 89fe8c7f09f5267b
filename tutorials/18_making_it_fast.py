# %% [markdown]
# # 18 · Making it fast
#
# A decode step does little arithmetic on many bytes, so fast means to move each byte once.
#
# To make one token, a model multiplies a vector with every weight that it has. Each weight is read
# from memory for one multiplication. A processor can do many more than that in the time of the
# reading. So in a decode step, *bytes* are what you pay for, and this tutorial counts them.

# %%
import dataclasses
import inspect
import itertools
import time

import torch
from rich import print
from rich.syntax import Syntax
from torch.utils._python_dispatch import TorchDispatchMode

from minipaged import LLM
from minipaged.bench.roofs import weights_read
from minipaged.model.attention import make_backend
from minipaged.model.attention.compiled import TILE, Tiles, attend_tiles
from minipaged.model.batch import RaggedBatch
from minipaged.step import Sample, SamplingRules, SequenceWork, StepPlan
from minipaged.worker.kv_cache import bytes_per_block

llm = LLM(num_gpu_blocks_override=256, max_model_len=512)  # blocks of 16 tokens
worker = llm.llm_engine.worker


def decode(context_lens):
    """A plan with one decode for each context, in blocks of its own."""
    work, sampling, blocks = [], [], itertools.count()
    for i, length in enumerate(context_lens):
        table = tuple(itertools.islice(blocks, -(-length // 16)))
        work.append(SequenceWork(i, (1,), length - 1, table, 0))
        sampling.append(Sample(i, ((0, 0),), SamplingRules(temperature=0.0)))
    return StepPlan(0, tuple(work), tuple(sampling))


# %% [markdown]
# ## Predict
#
# A token of the default model is multiplied with 134 million weights of four bytes. A token in the
# cache takes 46,080 bytes.
#
# * How many bytes must a step read that makes one token for *one* sequence of 100 tokens? And for
# *eight* of them?
# * How many bytes is that for each token made?

# %% [markdown]
# ## Run

# %%
weight_bytes = weights_read(worker.config) * worker.dtype.itemsize
token_bytes = bytes_per_block(worker.config, 1, worker.dtype)
per_token = {}
for batch_size in (1, 8, 32):
    kv_bytes = batch_size * 100 * token_bytes
    per_token[batch_size] = (weight_bytes + kv_bytes) / batch_size
    plan = decode([100] * batch_size)
    worker.execute(plan)  # to warm up
    begin = time.perf_counter()
    worker.execute(plan)
    ms = 1000 * (time.perf_counter() - begin)
    print(
        f"batch {batch_size:2}: weights {weight_bytes / 1e6:.0f} MB"
        f" + KV {kv_bytes / 1e6:5.1f} MB,"
        f" {per_token[batch_size] / 1e6:5.1f} MB for each token; {ms:4.0f} ms"
    )

assert round(weights_read(worker.config) / 1e6) == 134
assert token_bytes == 46_080
assert per_token[8] < per_token[1] / 6

# %% [markdown]
# The weights are read once for the whole batch. That is why batching pays, and why the paper fights
# for every block of memory: more sequences in memory are a larger batch.
#
# (The time does not shrink as far as the bytes do: on few cores the arithmetic of a batch soon
# counts too. On a GPU it takes many more sequences before that happens.)

# %% [markdown]
# ## Predict
#
# Now one attention layer, and twelve decodes with contexts of different lengths. It has to read
# each key and each value once.
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
    num_operations = written = 0

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
batch = RaggedBatch.build(decode(lengths).work, 16, "cpu")
heads = worker.config.num_heads, worker.config.num_kv_heads
tiles = Tiles.of(batch, *heads)
layer = worker.cache.layers[0]
keys, values = layer.key.flatten(0, 1), layer.value.flatten(0, 1)
torch.manual_seed(0)
query = torch.randn(12, worker.config.num_heads, worker.config.head_dim)
with torch.inference_mode():  # any keys and values will do
    keys.normal_()
    values.normal_()


def backend(name):
    backend = make_backend(name)
    metadata = backend.prepare(batch, *heads, query.dtype)
    return lambda: backend.forward(query, layer, metadata)


# %% [markdown]
# Beside `gather` run two others: `reference`, the paper's equation from tutorial 04, and
# `attend_tiles`, the heart of the backend named `compiled`, here as it is before anything compiles it.

# %%
ways = {
    "reference": backend("reference"),
    "gather": backend("gather"),
    "attend_tiles": lambda: attend_tiles(query, keys, values, tiles),
}
outputs, counts = {}, {}
for name, attention in ways.items():
    with torch.inference_mode(), Counted() as counts[name]:
        outputs[name] = attention()
    print(
        f"{name:12} {counts[name].num_operations:5} operations,"
        f" {counts[name].written / 1024:6.0f} KiB written"
    )
kv_bytes = sum(lengths) * token_bytes // worker.config.num_layers
print(f"keys and values of the contexts: {kv_bytes / 1024:.0f} KiB")

for name in ("gather", "attend_tiles"):
    assert torch.allclose(outputs[name], outputs["reference"], atol=1e-5)
    assert counts[name].num_operations < counts["reference"].num_operations / 10
assert counts["gather"].written > kv_bytes  # a copy, and padding
assert counts["attend_tiles"].written > 2 * counts["gather"].written

# %% [markdown]
# `reference` goes block by block: a great many small operations. `gather` has few, but it reads
# each key from the pool, writes it to a buffer, and reads it again: three times, where once would
# do.
#
# And `attend_tiles`? It writes most of all. Here is the line that does it.

# %%
source = inspect.getsource(attend_tiles)
line = source[source.index("scores =") :].split("  #")[0]
print(Syntax(line, "python", background_color="default", word_wrap=True))
assert line.endswith(".sum(-1)")

# %% [markdown]
# ## What it means
#
# Query times key, summed up. As plain Python, `key[tiles.places]` is a copy of all keys, one for each
# head that reads them, and its product with the queries is as large again. Nobody should run it
# like that.
#
# It was written for a compiler. `torch.compile` makes one loop of it, in which a key is loaded from
# its slot in the pool, multiplied, and added to a running sum in a register. The product is never a
# tensor, and `key[tiles.places]` is only an address. For the values torch has such a loop already,
# under a name from another trade: `F.embedding_bag` adds up vectors of a table at given places, each
# times a weight. What these *fused* loops move is keys and values once, the output once, and small
# things for each tile.
#
# `LLM(enforce_eager=False)` compiles a whole decoder layer like that (half a minute the first
# time), and one graph runs for all thirty. Norms, rotations and residuals are fused as well.
# `python -m minipaged.bench attention` times the backends on your machine.

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
unwritten = 256 * 16 - 1  # the pool's last slot
is_padding = torch.arange(TILE) >= tiles.filled[:, None]
careless = dataclasses.replace(
    tiles, places=tiles.places.masked_fill(is_padding, unwritten * heads[1])
)
with torch.inference_mode():
    values[unwritten] = float("nan")
    fine = attend_tiles(query, keys, values, tiles)
    broken = attend_tiles(query, keys, values, careless)
hit = broken.isnan().flatten(1).any(1)
print(f"rows that became NaN: {int(hit.sum())} of {len(lengths)}")

assert torch.allclose(fine, outputs["reference"], atol=1e-5)
assert hit.all()  # zero times NaN is NaN

# %% [markdown]
# A weight of zero does not protect from NaN. Such a bug sleeps as long as memory is clean. The tests
# of this library fill every unused slot with NaN.

# %% [markdown]
# ## Exercise
#
# Suppose that a machine reads `bandwidth` bytes in a second and that arithmetic costs nothing. How
# many tokens a second can it decode at most, for a batch of sequences with `context` tokens each?
# (`weight_bytes` and `token_bytes` are above. Each sequence gets one token in a step.)


# %%
def my_bound(bandwidth, batch_size, context):
    return ...


def check(bound):
    for batch_size, context in ((1, 100), (8, 100), (64, 1000)):
        plan = decode([context] * batch_size)
        num_read = sum(row.start + len(row.token_ids) for row in plan.work)
        seconds = (weight_bytes + num_read * token_bytes) / 10e9  # at 10 GB/s
        said = bound(10e9, batch_size, context)
        case = f"batch {batch_size:2}, context {context:4}"
        assert abs(said * seconds / batch_size - 1) < 1e-9, (
            f"{case}: a step takes {seconds * 1e3:.1f} ms and makes"
            f" {batch_size} tokens; you say {said:.1f} tokens a second"
        )
        print(f"{case}: {said:6.0f} tokens a second")


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
