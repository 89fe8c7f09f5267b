# %% [markdown]
# # 17 · Several ranks on a laptop
#
# Several workers share one model's weights and KV cache, and one scheduler's plan serves them all.
#
# A large model does not fit onto one GPU. **Tensor parallelism** cuts every large weight into
# shares. Each worker, called a **rank**, holds one share, and all ranks run the same program on the
# same tokens (paper, section 4.6).
#
# Who looks after the KV cache then? The paper's answer: one block manager, in the scheduler. A
# block number means the same block on every rank, and each rank stores in it only its own heads.
#
# Ranks are processes, each on a GPU of its own. Here they are three threads of this process, so
# that you can look into each of them. All that a model sees of its fellows is the small object
# below: a rank, a size, and calls in which all ranks meet. A meeting of threads is short: put your
# value down, wait until all have done so, take what lies there.

# %%
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import patch

import torch
from rich import print

from minipaged import LLM, SamplingParams
from minipaged.engine_args import EngineArgs
from minipaged.errors import InvalidParameter
from minipaged.model.ranks import check_split, split_heads
from minipaged.step import Sample, SamplingRules, SequenceWork, StepPlan
from minipaged.worker.worker import Worker


class ThreadRanks:
    size = 3
    places, barrier = [None] * 3, threading.Barrier(3)

    def __init__(self, rank):
        self.rank = rank
        self.num_all_reduces = 0

    def exchange(self, value):
        self.places[self.rank] = value
        self.barrier.wait(60)
        everybody = list(self.places)
        self.barrier.wait(60)  # all have seen it: the next one may come
        return everybody

    gather = collect = exchange

    def all_reduce(self, x):
        self.num_all_reduces += 1
        return sum(self.exchange(x))


# %% [markdown]
# Three workers of this library, each with such an object, and one worker alone to compare with.


# %%
def on_all(work):
    """work(worker) on all ranks at the same time; their results."""
    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(work, workers))


args = {"block_size": 4, "num_gpu_blocks_override": 16, "max_model_len": 32}
workers = [Worker(EngineArgs(**args), ThreadRanks(rank)) for rank in range(3)]
on_all(lambda worker: worker.load(max_num_batched_tokens=256))

one = LLM(preemption_mode="recompute", **args)
alone, tokenizer = one.llm_engine.worker, one.llm_engine.tokenizer

# %% [markdown]
# ## Predict
#
# Each layer of the model ends in an MLP, `down(silu(gate(x)) * up(x))`. A token has 576 numbers
# outside of it and 1,536 in the middle. `gate` and `up` are cut by rows: each rank computes a third
# of the middle, 512 numbers.
#
# * How must `down` be cut, so that each rank can go on with the numbers that it has?
# * What does each rank hold at the end, and how does the result come out of that?

# %% [markdown]
# ## Run
#
# The MLP of the first layer, on three tokens. Its `all_reduce` does nothing for now, so that each
# rank's own result can be seen.

# %%
torch.manual_seed(0)
x = torch.randn(3, 576)
mlps = [worker.model.model.layers[0].mlp for worker in workers]
with patch.object(ThreadRanks, "all_reduce", lambda self, x: x):
    parts = [mlp(x) for mlp in mlps]
whole = alone.model.model.layers[0].mlp(x)

for rank, (mlp, part) in enumerate(zip(mlps, parts, strict=True)):
    gate, up = mlp.gate_up_proj(x)
    print(
        f"rank {rank}: in the middle {tuple(gate.shape)},"
        f" at the end {tuple(part.shape)},"
        f" off by {(part - whole).abs().max():.1f}"
    )
off = (sum(parts) - whole).abs().max()
print(f"the sum of the three: off by {off:.4f}")

assert all((part - whole).abs().max() > 1 for part in parts)
assert off < 0.01

# %% [markdown]
# `down` is cut by columns, and each rank ends with a *partial sum* of the right shape. Adding them
# up over all ranks, so that each rank gets the total, is called an **all-reduce**.
#
# Attention is cut in the same way. Each rank computes its own heads (heads do not look at each
# other), and the output projection ends in an all-reduce.

# %% [markdown]
# ## Predict
#
# Now a whole step. The model has 30 layers and 9 heads, which share 3 KV heads. One plan, the same
# for all ranks, feeds a prompt into the blocks 7 and 1.
#
# * What does each rank write into its block 7?
# * The embedding is cut too, and ends in one all-reduce. How many does the step take altogether?

# %% [markdown]
# ## Run
#
# The scores of all words are cut as well, and gathered at the end.

# %%
prompt = tuple(tokenizer.encode("The capital of France is"))
row = SequenceWork(
    seq_id=0, token_ids=prompt, start=0, block_table=(7, 1), table_version=0
)
next_token = Sample(
    row=0, draws=((0, 0),), rules=SamplingRules(temperature=0.0)
)
plan = StepPlan(0, work=(row,), sampling=(next_token,))


def word(result):
    return tokenizer.token_text(result.entries[0][0].token_id)


for worker in workers:
    worker.ranks.num_all_reduces = 0
expected = word(alone.execute(plan))
together = word(on_all(lambda worker: worker.execute(plan))[0])
num_all_reduces = [worker.ranks.num_all_reduces for worker in workers]
print(f"one rank: {expected!r}   three ranks: {together!r}")
print(f"all-reduces: {num_all_reduces}")

assert together == expected == " Paris"
assert num_all_reduces == [1 + 2 * 30] * 3

# %% [markdown]
# One for the embedding, and two in each layer. And block 7?

# %%
own = [worker.cache.layers[0].key[7] for worker in workers]
joined = torch.cat(own, dim=1)
print(f"block 7 has (slots, heads, numbers) = {tuple(own[0].shape)} on a rank,")
print(f"and {tuple(joined.shape)} on all together")

assert torch.allclose(joined, alone.cache.layers[0].key[7], atol=1e-3)
assert all(worker.cache.num_blocks == 16 for worker in workers)

# %% [markdown]
# Every rank has all sixteen blocks, with one KV head of three in each slot. Side by side, their
# keys are what a single worker writes. So one table and one plan are right for all ranks.

# %% [markdown]
# ## Break it
#
# Let the all-reduce forget the others: every rank goes on with its own partial sum.

# %%
with patch.object(ThreadRanks, "all_reduce", lambda self, x: x):
    broken = word(on_all(lambda worker: worker.execute(plan))[0])
print(f"should be: {together!r}   is: {broken!r}")

assert broken != together

# %% [markdown]
# No shape was wrong, so nothing complained.

# %% [markdown]
# ## Run it for real
#
# With `tensor_parallel_size=3` the engine starts two more processes. The scheduler and the block
# manager are in this one, which also draws the tokens. In each step it sends the others what they
# need of the plan: tokens, positions, and what is new in the block tables.

# %%
traffic = []


def note_traffic(plan, result, snapshot):
    traffic.append(llm.llm_engine.worker.ranks.traffic["plan bytes"])


params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
question = "Four score and seven years ago our"
[expected] = one.generate(question, params, use_tqdm=False)
with LLM(tensor_parallel_size=3, on_step=note_traffic, **args) as llm:
    [output] = llm.generate(question, params, use_tqdm=False)
sent = [b - a for a, b in zip(traffic, traffic[1:], strict=False)]
print(f"three processes say: {output.outputs[0].text!r}")
print(f"bytes of the plans: {traffic[0]} for the prompt's, then {sent}")

assert output.outputs[0].token_ids == expected.outputs[0].token_ids
assert max(sent) < 100

# %% [markdown]
# A decode step needs less than a hundred bytes of news. Nobody asks the others which blocks are
# free, so nobody has to agree on anything.

# %% [markdown]
# ## Exercise
#
# Heads are not cut, so the number of ranks must divide them. If there are more ranks than KV heads,
# neighbours hold copies of the same one. Llama 3 8B has 32 heads and 8 KV heads.
#
# * Over how many ranks can its heads be split? Give all sizes.
# * With 16 ranks, how many times as much memory do all their KV caches take together, compared with
# one rank?

# %%
my_sizes, my_factor = ..., ...


def check(sizes, factor):
    eight_b = dataclasses.replace(alone.config, num_heads=32, num_kv_heads=8)
    for size in range(1, 65):
        try:
            check_split(eight_b, size)
            reason = ""
        except InvalidParameter as error:
            reason = f"not possible: {error}"
        assert (size in sizes) == (not reason), reason or f"{size} is possible"
    ranks = [SimpleNamespace(rank=rank, size=16) for rank in range(16)]
    num_held = sum(split_heads(8, rank).size for rank in ranks)
    assert factor == num_held / 8, f"16 ranks hold {num_held} KV heads"
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
# Next, 18: what a step has to move, and how to make it faster.
