# %% [markdown]
# # 13 · Running out: swap
#
# When no block is free, the latest request's blocks move to other memory, and later they come back.
#
# Tutorial 12 threw a request's blocks away and computed them again. A GPU sits beside a computer
# with plenty of ordinary memory, so there is another way: copy the blocks there (**swap out**), and
# copy them back when there is room (**swap in**). Nothing is computed twice. What it costs is the
# copying (paper, section 4.5).
#
# This library has two pools for that, each with its own allocator: the *device* pool, and the
# *host* pool. On a machine without a GPU both lie in the same memory, and everything works the same
# way.

# %%
import dataclasses
from unittest.mock import patch

from rich import print

from minipaged import LLM, SamplingParams
from minipaged.show import Recorder, draw_pool, draw_tables, explain, label
from minipaged.step import StepPlan
from minipaged.worker.kv_cache import bytes_per_block


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def make(num_blocks, num_host_blocks, **args):
    """An engine, and its recorder."""
    gib = num_host_blocks * block_bytes / 2**30  # as vLLM asks for it
    recorder = Recorder()
    llm = LLM(
        block_size=4,
        num_gpu_blocks_override=num_blocks,
        max_model_len=64,
        swap_space=gib,
        on_step=recorder,
        **args,
    )
    recorder.token_text = llm.llm_engine.tokenizer.token_text
    return llm, recorder


roomy = LLM(block_size=4, num_gpu_blocks_override=32, max_model_len=64)
worker = roomy.llm_engine.worker
block_bytes = bytes_per_block(worker.config, 4, worker.dtype)
print(f"a block of four tokens takes {block_bytes:,} bytes")

# keys and values, 30 layers, 4 slots, 3 heads of 64 numbers of 4 bytes
assert block_bytes == 2 * 30 * 4 * 3 * 64 * 4

# %% [markdown]
# ## Predict
#
# The scene of tutorial 12: four device blocks of four tokens, two prompts of seven tokens, five
# tokens out. In step 2 both requests need a third block, and none is free. Now there are also two
# host blocks.
#
# * How many blocks move out? How many tokens does the second request feed in the step in which it
# is back?
# * The first request takes its new block in the very step in which the second one goes. What must
# happen in which order
#   inside that step?

# %% [markdown]
# ## Run

# %%
prompts = ["Four score and seven years ago our", "A B C D E F G"]
alone = [
    output.outputs[0].text
    for output in roomy.generate(prompts, greedy(5), use_tqdm=False)
]

llm, recorder = make(num_blocks=4, num_host_blocks=2, preemption_mode="swap")
answers = [
    output.outputs[0].text
    for output in llm.generate(prompts, greedy(5), use_tqdm=False)
]
frames = list(recorder.frames)
for number, frame in enumerate(frames):
    fed = "  ".join(
        f"{label(row.seq_id)} {len(row.token_ids)}" for row in frame.plan.work
    )
    print(
        f"step {number}   fed: {fed:10}"
        f"   out: {frame.plan.swap_out}   in: {frame.plan.swap_in}"
    )

counts = llm.get_metrics().counts
assert (counts.num_blocks_swapped_out, counts.num_blocks_swapped_in) == (2, 2)
assert counts.num_recomputed_tokens == 0
assert counts.num_computed_tokens == 2 * (
    7 + 4
)  # not one more than without preemption
assert answers == alone

# %% [markdown]
# Two blocks go out in step 2 and come back in step 5, and then B goes on with one token, as if
# nothing had happened. (Pairs are block numbers: from, to.) Here is step 2.

# %%
print(*explain(frames[2], recorder.words), sep="\n")
print(draw_pool(frames[2].snapshot, frames[2].plan))
print(draw_tables(frames[2].snapshot))

out_to_host = dict(frames[2].plan.swap_out)
reused = frames[2].plan.work[0].block_table[-1]
assert reused in out_to_host  # A's new block was B's a moment ago

# %% [markdown]
# A writes its new token into a block that held B's keys at the beginning of the same step. That is
# safe because the order inside a step is fixed: swap out, swap in, copies, and only then the model.

# %% [markdown]
# ## Break it
#
# Let the worker swap out *after* the model has run. We hand it the plan in two halves, in the wrong
# order.

# %%
worker = llm.llm_engine.worker
execute = worker.execute


def swap_out_last(plan):
    result = execute(dataclasses.replace(plan, swap_out=()))
    execute(StepPlan(plan.step, (), (), swap_out=plan.swap_out))
    return result


with patch.object(worker, "execute", swap_out_last):
    broken = [
        output.outputs[0].text
        for output in llm.generate(prompts, greedy(5), use_tqdm=False)
    ]
print("should be:", repr(alone[1]))
print("is:       ", repr(broken[1]))

assert broken[0] == alone[0]
assert broken[1] != alone[1]
llm.llm_engine.scheduler.check()

# %% [markdown]
# B comes back with one foreign key among its own. The books are in order, no error is raised, and
# the answer is another one. On a GPU, where copies run beside the computation, it takes care to
# keep this order. Here it is the order of three lines in `worker/worker.py`.

# %% [markdown]
# ## Predict
#
# A request with several samples shares blocks between them (tutorials 07 to 09). Three samples of a
# prompt of six tokens, blocks of four. After one more token each, the three tables have six entries
# together.
#
# The whole request is swapped out. How many blocks are copied?

# %% [markdown]
# ## Run
#
# A policy of our own puts the group out when we want it: the scheduler asks it once in a step.


# %%
class PutOutAtStep:
    """Preempts the latest group once, whether or not anybody must go."""

    def __init__(self, step):
        self.step = step

    def next_victim(self, running, must):
        self.step -= 1
        return running[-1] if must or self.step == 0 else None


six_tokens = "Four score and seven years ago"
three = SamplingParams(n=3, seed=7, max_tokens=4, ignore_eos=True)
expected = [
    answer.text
    for answer in roomy.generate(six_tokens, three, use_tqdm=False)[0].outputs
]

llm, recorder = make(num_blocks=8, num_host_blocks=8, policy=PutOutAtStep(2))
samples = [
    answer.text
    for answer in llm.generate(six_tokens, three, use_tqdm=False)[0].outputs
]
out, back = recorder.frames[2], recorder.frames[3]
print(*explain(out), sep="\n")
print(draw_pool(out.snapshot))

assert len(out.plan.swap_out) == len(back.plan.swap_in) == 4
assert (
    sorted(out.snapshot.host_ref_counts)
    == sorted(back.snapshot.ref_counts)
    == [0, 0, 0, 0, 1, 1, 1, 3]
)
assert samples == expected

# %% [markdown]
# Four blocks, not six: the block with three references moves once, and has three references on the
# other side. Sharing survives both ways.
#
# This is also why the paper swaps such groups and recomputes single sequences, and why
# `preemption_mode="auto"`, the default, does so here. (Recomputing a group is possible too. It has
# to build the sharing again: `scheduling/recompute.py`.)

# %% [markdown]
# ## Exercise
#
# The host pool has an end as well. If a group does not fit into it, it is recomputed: nothing is
# ever lost.
#
# Take *four* samples of the same six tokens, put out when each has had four of its tokens fed, so
# that each has ten tokens in the cache. What is the smallest host pool that still takes the group?

# %%
my_host_blocks = ...


def recomputed_with(num_host_blocks):
    llm, _ = make(
        num_blocks=16, num_host_blocks=num_host_blocks, policy=PutOutAtStep(5)
    )
    four = SamplingParams(n=4, seed=7, max_tokens=6, ignore_eos=True)
    llm.generate(six_tokens, four, use_tqdm=False)
    return llm.get_metrics().counts.num_recomputed_tokens


def check(num_host_blocks):
    assert recomputed_with(num_host_blocks) == 0, (
        "it does not fit: which blocks are still shared after ten tokens?"
    )
    assert recomputed_with(num_host_blocks - 1) > 0, "a smaller one would do"
    print(
        f"right: {num_host_blocks} blocks,"
        f" {num_host_blocks * block_bytes / 2**20:.1f} MiB"
    )


if my_host_blocks is not ...:
    check(my_host_blocks)

# %% [markdown]
# ## Solution
#
# Ten tokens take three blocks. The first block is full of prompt and shared by all four. The second
# began as the prompt's last two tokens; each sample wrote into it, so each has its own
# (copy-on-write). The third is its own anyway.

# %%
check(1 + 4 * 2)

# %% [markdown]
# ## Where this is in the code
#
# `blocks/swap.py`: tables move between two pools, and sharing stays. `scheduling/swapping.py`: who
# is swapped. `step.py`: the order inside a step. `worker/kv_cache.py`: the copying. In the paper:
# section 4.5.
#
# Next, 14: recompute or swap, which one is cheaper?
