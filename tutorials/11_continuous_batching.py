# %% [markdown]
# # 11 · Continuous batching
#
# A request joins and leaves the batch at any step, and nobody waits for the slowest.
#
# A step of a model reads all its weights once, whether it makes one token or fifty. So a server
# batches requests. The question is when the batch may change.
#
# * **Static batching**: take some requests, run until *all* of them have ended, take the next ones.
# * **Continuous batching** (iteration-level scheduling, from the Orca system): look again before
# every step.
#
# Paging makes the second one easy. A request that joins needs a few blocks from anywhere, and one
# that leaves gives its blocks back at once.

# %%
from unittest.mock import patch

from rich import print

from minipaged import LLM, SamplingParams
from minipaged.errors import InvariantBroken
from minipaged.model.batch import RaggedBatch
from minipaged.show import Recorder, draw_plan, draw_queues, label


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


recorder = Recorder()
llm = LLM(
    block_size=4,
    num_gpu_blocks_override=16,
    max_model_len=32,
    max_num_seqs=2,
    on_step=recorder,
)
engine = llm.llm_engine
recorder.token_text = engine.tokenizer.token_text

prompts = [
    "The opposite of hot is",
    "Once upon a time, there",
    "One, two, three,",
    "The capital of France is",
    "A B C D",
]
lengths = [8, 2, 2, 2, 2]  # the tokens that each of them wants

# %% [markdown]
# ## Predict
#
# The machine has room for two sequences at a time (`max_num_seqs=2`). Five requests are there from
# the beginning. The first wants 8 tokens, the others 2 each. A step gives each sequence of the
# batch one token, and the step that computes a prompt already gives the first.
#
# * How many steps does static batching take, two requests at a time, in order of arrival?
# * How many steps does continuous batching take?

# %% [markdown]
# ## Run
#
# First the static way. The same engine does it if we hand it two requests, and the next two only
# when it is empty.


# %%
def timeline():
    """Print a line for each recorded step; returns how many there are."""
    for number, frame in enumerate(recorder.frames):
        batch = " ".join(label(row.seq_id) for row in frame.plan.work)
        print(
            f"step {number:2}   batch: {batch:5}"
            f" tokens fed: {frame.plan.num_tokens}"
        )
    return len(recorder.frames)


static_answers = []
for begin in range(0, len(prompts), 2):
    two = slice(begin, begin + 2)
    outputs = llm.generate(
        prompts[two], [greedy(n) for n in lengths[two]], use_tqdm=False
    )
    static_answers += [output.outputs[0].text for output in outputs]

static_steps = timeline()
assert static_steps == 8 + 2 + 2

# %% [markdown]
# In steps 2 to 7 one of the two places is empty: A is still talking, B has long gone, and C may not
# come in.
#
# Now all five are handed over at once. Nothing else changes.


# %%
def run_all(order=range(5)):
    """All five requests at once, in this order; returns their answers."""
    recorder.frames.clear()
    outputs = llm.generate(
        [prompts[i] for i in order],
        [greedy(lengths[i]) for i in order],
        use_tqdm=False,
    )
    return [output.outputs[0].text for output in outputs]


answers = run_all()
frames = list(recorder.frames)
steps = timeline()

assert steps == 8
assert all(len(frame.plan.work) == 2 for frame in frames)
assert answers == static_answers

# %% [markdown]
# Eight steps instead of twelve, and no place is ever empty. (Letters count on through the life of
# an engine: F is the first request now.)
#
# The answers are the same. That is a law of this engine: the company in a batch may change *when* a
# token comes, never *which*.

# %% [markdown]
# ## What it means
#
# Look at step 2, in which the second place changes hands for the first time.

# %%
print(draw_plan(frames[2], recorder.words))
print(draw_queues(frames[2].snapshot))

# %% [markdown]
# G ended in step 1, so its blocks were free before step 2 was planned, and H begins at once.
#
# F feeds one token in that step (a *decode*), H its whole prompt (a *prefill*). They pass through
# the model side by side, as one ragged batch. There is no padding: each token carries its own
# position and its own slot.

# %%
plan = frames[2].plan
batch = RaggedBatch.build(plan.work, block_size=4, device="cpu")
print(
    "tokens    " + " ".join(f"{token:4}" for token in batch.token_ids.tolist())
)
print(
    "positions "
    + " ".join(f"{position:4}" for position in batch.positions.tolist())
)
print("slots     " + " ".join(f"{slot:4}" for slot in batch.slots.tolist()))

assert [len(row.token_ids) for row in plan.work] == [1, 6]
assert len(batch.token_ids) == plan.num_tokens == 1 + 6
assert batch.positions.tolist() == [6, 0, 1, 2, 3, 4, 5]

# %% [markdown]
# ## Break it
#
# Two rules make this work. The first: **who may start is asked before every step**. One method
# answers, `Admission.admit`. Let it admit nobody while anybody runs. What do you expect?

# %%
admission = engine.scheduler._admission
admit = admission.admit


def admit_when_empty(builder):
    return [] if engine.scheduler.running else admit(builder)


with patch.object(admission, "admit", admit_when_empty):
    assert run_all() == answers
assert timeline() == static_steps

# %% [markdown]
# Static batching again, and still no wrong token.
#
# The second rule: **whoever ends gives its blocks back at once**. Let the engine forget that, for
# one request. Nothing crashes and the next steps look fine. But the books are wrong, and `check()`
# reads the books.

# %%
with patch.object(engine.blocks, "free", lambda seq_id: None):
    llm.generate(prompts[4], greedy(1), use_tqdm=False)
try:
    engine.scheduler.check()
    complaint = "no complaint"
except InvariantBroken as error:
    complaint = str(error)
print(complaint)

assert "have device blocks and should not" in complaint
assert engine.blocks.num_free == 15

for seq_id in engine.blocks.tables():  # tidy up
    engine.blocks.free(seq_id)
engine.scheduler.check()
assert engine.blocks.num_free == 16

# %% [markdown]
# A server with this bug works for an hour, slower and slower, and then stops: the pool is full of
# blocks that nobody reads.

# %% [markdown]
# ## Exercise
#
# The scheduler serves whoever comes first. Suppose the four short requests come first, and the long
# one last. How many steps does continuous batching take?
#
# And what is the smallest number of steps that *any* order could reach? Write it as a formula of
# the lengths and the number of places.


# %%
my_steps = ...  # short ones first, the long one last


def my_lower_bound(lengths, places):
    return ...


def check(steps, lower_bound):
    run_all([1, 2, 3, 4, 0])
    assert steps == len(recorder.frames), (
        "draw two rows, one for each place, and fill them from the left"
    )
    run_all([0, 1, 2, 3, 4])
    assert lower_bound(lengths, 2) == len(recorder.frames), (
        "the order that was run first cannot be beaten"
    )
    assert lower_bound([5, 5, 5], 2) == 8, "15 tokens at two a step"
    assert lower_bound([9, 1, 1], 2) == 9, "nobody gets two tokens in a step"
    print("right")


if my_steps is not ... and my_lower_bound(lengths, 2) is not ...:
    check(my_steps, my_lower_bound)

# %% [markdown]
# ## Solution
#
# The short ones fill both places for 2 + 2 steps. Then the long one runs for 8 steps beside an
# empty place.
#
# No order is shorter than the longest request, and none is shorter than all tokens divided over the
# places.

# %%
check(
    4 + 8, lambda lengths, places: max(max(lengths), -(-sum(lengths) // places))
)

# %% [markdown]
# A server does not know the lengths beforehand, so it cannot sort by them. It can let everybody in
# as soon as there is room, and here that took it from twelve steps to eight.

# %% [markdown]
# ## Where this is in the code
#
# `scheduling/scheduler.py`: a step, in order. `scheduling/admission.py`: who may start.
# `model/batch.py`: the ragged batch. In the paper: sections 2.3 and 4.5.
#
# Next, 12: a running request needs one more block, and none is free.
