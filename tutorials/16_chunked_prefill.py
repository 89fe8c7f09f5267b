# %% [markdown]
# # 16 · Chunked prefill
#
# A step has a budget of tokens, so a long prompt is computed in pieces while the others keep
# talking.
#
# A decode feeds one token, a prefill feeds a whole prompt. Put both into one step, and the step
# takes as long as the prompt does: everybody who reads an answer as it is written sees it stop for
# a while.
#
# The remedy is a budget, `max_num_batched_tokens`. Decodes take theirs first, one token each. What
# is left goes to prompts, and a prompt that does not fit is cut: the rest comes in the next steps.
# The paper's vLLM did not have this yet; later versions do.

# %%
import builtins
import dataclasses
from unittest.mock import patch

from rich import print

from minipaged import LLM, SamplingParams
from minipaged.scheduling import share
from minipaged.show import Recorder, explain, label

recorder = Recorder()


def make(budget, **args):
    return LLM(
        block_size=4,
        num_gpu_blocks_override=24,
        max_model_len=48,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        preemption_mode="recompute",
        on_step=recorder,
        **args,
    )


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


talking = "1, 2, 3,"  # 8 tokens
reading = (  # 31 tokens
    "The quick brown fox jumps over the lazy dog, and the dog, "
    "who was not as lazy as all that, got up and ran after the fox until"
)


def scene(llm):
    """A talks; after two steps B comes with the long prompt."""
    recorder.frames.clear()
    engine, answers = llm.llm_engine, {}
    engine.add_request("talking", talking, greedy(10))
    engine.step()
    engine.step()
    engine.add_request("reading", reading, greedy(2))
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id] = output.outputs[0].text
    for number, frame in enumerate(recorder.frames):
        bar = "".join(
            ("░▓")[row.seq_id % 2] * len(row.token_ids)
            for row in frame.plan.work
        )
        print(f"step {number:2}  {frame.plan.num_tokens:2} tokens  {bar}")
    print("░ talking  ▓ reading")
    return answers


# %% [markdown]
# ## Predict
#
# First without chunks: `enable_chunked_prefill=False`. A prompt of 8 tokens is talking, and one of
# 31 tokens comes before step 2.
#
# * How many tokens does step 2 feed?
#
# Then with chunks and a budget of 8 tokens.
#
# * In which pieces is the prompt of 31 computed? In which step does its first answer token come?

# %% [markdown]
# ## Run

# %%
whole = scene(make(budget=48, enable_chunked_prefill=False))
longest_whole = max(frame.plan.num_tokens for frame in recorder.frames)

assert longest_whole == 1 + 31

# %% [markdown]
# One step of 32 tokens among steps of one. While it runs, the talking request gets its token as
# well, but late.

# %%
llm = make(budget=8)
chunked = scene(llm)
frames = list(recorder.frames)
chunks = [
    len(row.token_ids)
    for frame in frames
    for row in frame.plan.work
    if label(row.seq_id) == "B"
]
print(f"pieces of B: {chunks}")

assert max(frame.plan.num_tokens for frame in frames) == 8
assert chunks == [
    7,
    7,
    7,
    7,
    3,
    1,
]  # the prompt in five pieces, then one answer token fed
assert all(label(frame.plan.work[0].seq_id) == "A" for frame in frames)
assert chunked == whole

# %% [markdown]
# No step is longer than eight tokens, and A speaks in every one of them. The price: B's first token
# comes in step 6, four steps later than before. The answers are the same.

# %% [markdown]
# ## What it means
#
# Look at a piece in the middle, and at the last one.

# %%
print(*explain(frames[3]), sep="\n")
print()
print(*explain(frames[6]), sep="\n")

middle, last = frames[3].plan, frames[6].plan
assert [entry.row for entry in middle.sampling] == [0]  # A alone
assert [entry.row for entry in last.sampling] == [0, 1]
assert middle.work[1].start == 7 and last.work[1].start == 28

# %% [markdown]
# A piece computes keys and values and says nothing. Only the last token of a prompt has logits that
# anybody wants, so only the row that reaches the end samples.
#
# Chunks needed no new machinery. A sequence has tokens and `num_computed`; a step feeds some of the
# rest. A prefill that ends early because the budget does is a chunk.

# %% [markdown]
# ## Break it
#
# The rule is "decodes first". One line orders the groups, in `scheduling/share.py`: `sorted(groups,
# key=lambda g: g.is_prefill)`. Turn it round. What will the talking request notice?


# %%
def prefills_first(groups, key):
    return builtins.sorted(groups, key=key, reverse=True)


with patch.object(share, "sorted", prefills_first, create=True):
    starved = scene(llm)
silent = [
    i
    for i, frame in enumerate(recorder.frames)
    if frame.plan.num_tokens == 8 and len(frame.plan.work) == 1
]
print(f"steps in which a prompt has the machine to itself: {silent}")

assert silent == [0, 3, 4, 5]  # step 0 is A's own prompt
assert starved == chunked

# %% [markdown]
# A is silent for three steps: the pieces take the whole budget. With one long prompt after another
# it would stay silent. The tokens are still right. That rule decides *when*.

# %% [markdown]
# ## Break it again
#
# Another rule decides *which*: a piece goes on where the last one ended. Tell the worker that each
# piece begins at position 0.

# %%
worker = llm.llm_engine.worker
execute = worker.execute


def from_the_beginning(plan):
    rows = [
        dataclasses.replace(row, start=0) if len(row.token_ids) > 1 else row
        for row in plan.work
    ]
    return execute(dataclasses.replace(plan, work=tuple(rows)))


with patch.object(worker, "execute", from_the_beginning):
    confused = scene(llm)
print("should be:", repr(chunked["reading"]))
print("is:       ", repr(confused["reading"]))

assert confused["reading"] != chunked["reading"]
assert confused["talking"] == chunked["talking"]

# %% [markdown]
# Every piece overwrote the one before it. The first token of the answer is chosen as if the last
# three tokens were all that the request had said.

# %% [markdown]
# ## Exercise
#
# The budget decides how long a step may be, and so how many steps a prompt takes. Write the number
# of steps for a prompt of `length` tokens beside `num_talking` requests that decode all the time.


# %%
def my_num_steps(length, budget, num_talking):
    return ...


def count_steps(length, budget, num_talking):
    """Asks the engine."""
    recorder.frames.clear()
    engine = make(budget).llm_engine
    for i in range(num_talking):
        engine.add_request(
            f"talking {i}", {"prompt_token_ids": [28]}, greedy(20)
        )
    engine.step()
    engine.add_request(
        "reading", {"prompt_token_ids": [28] * length}, greedy(1)
    )
    while not any(output.request_id == "reading" for output in engine.step()):
        pass
    return len(recorder.frames) - 1


def check(num_steps):
    for case in ((31, 8, 1), (30, 8, 3), (30, 13, 3)):
        counted = count_steps(*case)
        assert num_steps(*case) == counted, (
            f"for {case} the engine takes {counted} steps, "
            f"you say {num_steps(*case)}"
        )
    print("right")


if my_num_steps(31, 8, 1) is not ...:
    check(my_num_steps)

# %% [markdown]
# ## Solution


# %%
def num_steps(length, budget, num_talking):
    return -(-length // (budget - num_talking))  # rounded up


check(num_steps)

# %% [markdown]
# A small budget keeps everybody's steps short. A large one computes prompts in fewer steps, and
# reads the weights fewer times for it. The default here is 2,048 tokens.

# %% [markdown]
# ## Where this is in the code
#
# `scheduling/share.py`: the whole division of a step's tokens, in one function.
# `scheduling/plan_builder.py`: which rows sample. With a prefix cache, pieces end at block borders,
# so that they can be shared.
#
# Next, 17: the same plan, applied by three workers.
