# %% [markdown]
# # 17 · Two ranks on a laptop
#
# Several processes share one model's weights and KV cache, and one scheduler's plan serves them
# all.
#
# A large model does not fit onto one GPU. **Tensor parallelism** cuts every large weight into
# shares. Each rank holds one share, and all ranks run the same program on the same tokens (paper,
# section 4.6).
#
# Who looks after the KV cache then? The paper's answer: one block manager, in the scheduler. A
# block number means the same block on every rank, and each rank stores in it only its own heads. A
# plan that was made once can be applied anywhere, and a laptop is enough to see it: a rank is just
# a process.

# %%
import threading
from types import SimpleNamespace

import torch
from rich import print

from minipaged import LLM, SamplingParams
from minipaged.config import ModelConfig
from minipaged.engine_args import EngineArgs
from minipaged.errors import InvalidParameter
from minipaged.model.llama import LlamaMLP
from minipaged.model.ranks import ALONE, check_split, split_heads
from minipaged.model.weights import load_weights
from minipaged.step import Sample, SamplingRules, SequenceWork, StepPlan
from minipaged.worker.results import logit_rows
from minipaged.worker.worker import Worker

# %% [markdown]
# ## Predict
#
# Two ranks, and one MLP of a Llama layer, small enough to look at: `down(silu(gate(x)) * up(x))`.
# Vectors have 6 numbers outside and 8 in the middle. `gate` and `up` are cut by rows: rank 0
# computes the first four numbers of the middle, rank 1 the other four.
#
# * How must `down` be cut, so that each rank can go on with the four numbers that it has?
# * What does each rank hold at the end, and how does the result come out of that?

# %% [markdown]
# ## Run
#
# The library's own MLP, three times with the same weights: whole, and as each of two ranks. All
# that a model sees of its fellows is a small object, with a rank, a size and an `all_reduce`. Ours
# does nothing, so that we see what a rank has by itself.


# %%
def shape_of(num_heads, num_kv_heads, hidden=6, intermediate=8):
    return ModelConfig(
        vocab_size=32,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=4,
        max_position=64,
    )


torch.manual_seed(0)
weights = {
    "gate_proj.weight": (8, 6),
    "up_proj.weight": (8, 6),
    "down_proj.weight": (6, 8),
}
weights = {name: torch.randn(shape) for name, shape in weights.items()}


def mlp_of(ranks):
    mlp = LlamaMLP(shape_of(2, 2), torch.float32, "cpu", ranks)
    load_weights(mlp, weights.items())
    return mlp


whole = mlp_of(ALONE)
parts = [
    mlp_of(SimpleNamespace(rank=rank, size=2, all_reduce=lambda x: x))
    for rank in (0, 1)
]
for name, parameter in parts[1].named_parameters():
    print(
        f"rank 1 holds {tuple(parameter.shape)}"
        f" of {tuple(weights[name].shape)}  {name}"
    )

x = torch.randn(3, 6)  # three tokens
partial_sums = [part(x) for part in parts]

assert torch.equal(
    parts[1].gate_proj.weight, weights["gate_proj.weight"][4:]
)  # rows
assert torch.equal(
    parts[1].down_proj.weight, weights["down_proj.weight"][:, 4:]
)  # columns
assert not torch.allclose(partial_sums[0], whole(x), atol=1e-4)
assert torch.allclose(partial_sums[0] + partial_sums[1], whole(x), atol=1e-4)

# %% [markdown]
# `down` is cut by columns, and each rank ends with a *partial sum* of the right shape. Adding them
# up over all ranks, so that each rank gets the total, is called an **all-reduce**. It is the only
# moment in which ranks talk.
#
# Attention is cut in the same way. Each rank computes its own heads (heads do not look at each
# other), and the output projection ends in an all-reduce.

# %% [markdown]
# ## Predict
#
# The default model has 30 layers, 9 heads and 3 KV heads.
#
# * Can two ranks share it? Can three?
# * How many all-reduces does one step take?

# %% [markdown]
# ## Run

# %%
model_args = {
    "block_size": 4,
    "num_gpu_blocks_override": 16,
    "max_model_len": 32,
}
try:
    LLM(tensor_parallel_size=2, **model_args)
    refused = ""
except InvalidParameter as error:
    refused = str(error)
print(refused)
assert "must divide the model's 9 attention heads" in refused

# %% [markdown]
# Heads are not cut, so the ranks must divide them: three it is. Here are three ranks as three
# threads of this process, so that you can look into each of them. An all-reduce of threads is
# short: put your tensor down, wait until all have done so, add everything up.

# %%
SIZE = 3
places, barrier = [None] * SIZE, threading.Barrier(SIZE)


class ThreadRanks:
    """All that a model knows of its fellows (protocol: model/ranks.py)."""

    size = SIZE

    def __init__(self, rank):
        self.rank = rank
        self.num_all_reduces = 0

    def exchange(self, value):
        places[self.rank] = value
        barrier.wait(60)
        everybody = list(places)
        barrier.wait(
            60
        )  # nobody puts down the next one before all have seen this one
        return everybody

    def all_reduce(self, x):
        self.num_all_reduces += 1
        return torch.stack(self.exchange(x)).sum(0)

    def gather(self, x):
        return self.exchange(x)

    def collect(self, number):
        return self.exchange(number)


def on_all(work):
    """work(worker) on all ranks at the same time; their results."""
    results = [None] * SIZE

    def run(rank):
        results[rank] = work(workers[rank])

    threads = [
        threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


args = EngineArgs(**model_args)
workers = [Worker(args, ThreadRanks(rank)) for rank in range(SIZE)]
on_all(lambda worker: worker.load(256))

one = LLM(preemption_mode="recompute", **model_args)
tokenizer = one.llm_engine.tokenizer
alone = one.llm_engine.worker
for worker in workers:
    kv = worker.cache.layers[0].key
    print(
        f"rank {worker.ranks.rank}: {worker.cache.num_blocks} blocks,"
        f" keys {tuple(kv.shape)} in each layer"
    )

assert all(
    worker.cache.num_blocks == alone.cache.num_blocks for worker in workers
)
assert (
    sum(worker.cache.num_bytes for worker in workers) == alone.cache.num_bytes
)

# %% [markdown]
# Each rank has all sixteen blocks, and one head of three in each slot.
#
# Now one plan, for all of them: feed a prompt, and sample after its last token. The other ranks
# compute their share of the scores of all words, rank 0 gathers them and draws.

# %%
prompt = tuple(tokenizer.encode("The capital of France is"))
greedy = SamplingRules(temperature=0.0)
row = SequenceWork(
    seq_id=0, token_ids=prompt, start=0, block_table=(7, 1), table_version=0
)
plan = StepPlan(
    0, work=(row,), sampling=(Sample(row=0, draws=((0, 0),), rules=greedy),)
)


@torch.inference_mode()
def apply(worker):
    if worker.ranks.rank == 0:
        return worker.execute(plan)
    hidden = worker.forward(plan)
    return [
        worker.model.compute_logits(hidden[rows]) for rows in logit_rows(plan)
    ]


def drawn(result):
    return tokenizer.token_text(result.entries[0][0].token_id)


for worker in workers:
    worker.ranks.num_all_reduces = 0
together = drawn(on_all(apply)[0])
print(f"one rank: {drawn(alone.execute(plan))!r}   three ranks: {together!r}")

assert together == drawn(alone.execute(plan)) == " Paris"
assert [worker.ranks.num_all_reduces for worker in workers] == [
    1 + 2 * 30
] * SIZE

# %% [markdown]
# Sixty-one: one for the embedding, and two in each layer. And what did each rank write into block
# 7? Together, exactly what a single worker writes there.

# %%
own = [
    worker.cache.layers[0].key[7] for worker in workers
]  # each [4 slots, 1 head, 64]
joined = torch.cat(own, dim=1)
print(
    f"block 7: {tuple(own[0].shape)} on each rank,"
    f" {tuple(joined.shape)} together"
)

assert torch.allclose(joined, alone.cache.layers[0].key[7], atol=1e-3)

# %% [markdown]
# ## Break it
#
# Let the all-reduce forget the others: every rank goes on with its own partial sum.

# %%
reduce = ThreadRanks.all_reduce
ThreadRanks.all_reduce = lambda self, x: x
broken = drawn(on_all(apply)[0])
ThreadRanks.all_reduce = reduce
print(f"should be: {together!r}   is: {broken!r}")

assert broken != together
assert drawn(on_all(apply)[0]) == together  # and with it, all is well again

# %% [markdown]
# No shape was wrong, so nothing complained.

# %% [markdown]
# ## Run it for real
#
# With `tensor_parallel_size=3` the engine starts two more processes. The scheduler, the block
# manager and the sampler are in this one. In each step it sends the others what they need of the
# plan: tokens, positions, and what is new in the block tables.

# %%
traffic = []


def note_traffic(plan, result, snapshot):
    traffic.append(dict(llm.llm_engine.worker.ranks.traffic))


params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
question = "Four score and seven years ago our"
[expected] = one.generate(question, params, use_tqdm=False)
with LLM(tensor_parallel_size=3, on_step=note_traffic, **model_args) as llm:
    [output] = llm.generate(question, params, use_tqdm=False)
    held = llm.llm_engine.worker.held_bytes

print(f"three processes say: {output.outputs[0].text!r}")
sent = [
    after["plan bytes"] - before["plan bytes"]
    for before, after in zip(traffic, traffic[1:], strict=False)
]
print(
    f"bytes of the plans: {traffic[0]['plan bytes']} for the prompt's,"
    f" then {sent}"
)
for rank, (weight_bytes, kv_bytes) in enumerate(held):
    print(
        f"rank {rank} holds {weight_bytes / 2**20:.0f} MiB of weights,"
        f" {kv_bytes / 2**20:.1f} MiB of KV"
    )

assert output.outputs[0].token_ids == expected.outputs[0].token_ids
assert sum(kv_bytes for _, kv_bytes in held) == alone.cache.num_bytes
assert max(sent) < 100

# %% [markdown]
# A decode step needs less than a hundred bytes of news. Nobody asks the others which blocks are
# free, so nobody has to agree on anything.

# %% [markdown]
# ## Exercise
#
# A model has 32 heads and 8 KV heads (Llama 3 8B has). Ranks must divide the heads. If there are
# more ranks than KV heads, neighbours hold copies of the same one.
#
# * Over how many ranks can it be split, up to 32? Give all sizes.
# * With 16 ranks, how many times as much memory do all their KV caches take together, compared with
# one rank?

# %%
my_sizes = ...
my_factor = ...

eight_b = shape_of(
    num_heads=32, num_kv_heads=8, hidden=4096, intermediate=14336
)


def check(sizes, factor):
    for size in range(1, 33):
        try:
            check_split(eight_b, size)
            possible = True
        except InvalidParameter:
            possible = False
        assert possible == (size in sizes), (
            f"{size} ranks: {'possible' if possible else 'not possible'}"
        )
    heads_held = sum(
        split_heads(8, SimpleNamespace(rank=rank, size=16)).size
        for rank in range(16)
    )
    assert factor == heads_held / 8, f"16 ranks hold {heads_held} KV heads"
    print("right")


if my_sizes is not ... and my_factor is not ...:
    check(my_sizes, my_factor)

# %% [markdown]
# ## Solution
#
# Sixteen ranks hold one KV head each, and there are only eight different ones.

# %%
check([1, 2, 4, 8, 16, 32], 2)

# %% [markdown]
# On a laptop the ranks share the cores, so this is not faster. It is where you can read and test
# what runs over many GPUs.

# %% [markdown]
# ## Where this is in the code
#
# `model/parallel.py`: the layers that split. `model/ranks.py`: who holds what.
# `worker/plan_message.py`: the message. `worker/parallel_worker.py`: rank 0. In the paper: section
# 4.6.
#
# Next, 18: where the time of a step goes, and how to make it shorter.
