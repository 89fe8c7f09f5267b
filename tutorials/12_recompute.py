# %% [markdown]
# # 12 · Running out: recompute
#
# When no block is free, the latest request gives up all of its blocks, and its tokens are computed
# again later.
#
# Nobody knows how long answers will be, so the engine lets requests in while there is room, and one
# day all of them grow at the same time. Then somebody must go. The paper (section 4.5) asks two
# questions: *who*, and *how does it come back*?
#
# * Who: the one that came last. Whoever was there first is served first.
# * How: this tutorial throws the blocks away and computes them again. The next one moves them to
# other memory.

# %%
from unittest.mock import patch

from rich import print

from minipaged import LLM, SamplingParams
from minipaged.scheduling import scheduler as scheduler_module
from minipaged.scheduling.preemption import PreemptLatest
from minipaged.show import (
    Recorder,
    draw_pool,
    draw_queues,
    draw_tables,
    explain,
    label,
)

recorder = Recorder()


def make(num_blocks):
    return LLM(
        block_size=4,
        num_gpu_blocks_override=num_blocks,
        max_model_len=32,
        preemption_mode="recompute",
        on_step=recorder,
    )


roomy = make(num_blocks=8)
llm = make(num_blocks=4)
engine = llm.llm_engine
recorder.token_text = engine.tokenizer.token_text


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


prompts = ["Four score and seven years ago our", "One, two, three, four"]
outputs = roomy.generate(prompts, greedy(5), use_tqdm=False)
undisturbed = [output.outputs[0].text for output in outputs]

# %% [markdown]
# ## Predict
#
# A pool of four blocks of four tokens. Two prompts of seven tokens each, and each answer shall have
# five tokens.
#
# A sampled token is fed in the next step, and only then does it need a slot. So after step 0 each
# sequence has 7 filled slots, after step 1 it has 8.
#
# * In which step is the pool too small?
# * Who goes, and how many tokens are fed for it when it comes back?
# * How many tokens are computed twice?

# %% [markdown]
# ## Run

# %%
recorder.frames.clear()
outputs = llm.generate(prompts, greedy(5), use_tqdm=False)
counts = engine.get_metrics().counts
frames = list(recorder.frames)
for number, frame in enumerate(frames):
    fed = [
        f"{label(row.seq_id)} {len(row.token_ids)}" for row in frame.plan.work
    ]
    print(
        f"step {number}   fed: {'  '.join(fed):10}"
        f" blocks in use: {frame.snapshot.num_used_blocks}"
        f"   put out: {len(frame.snapshot.preempted)}"
    )

assert [len(output.prompt_token_ids) for output in outputs] == [7, 7]
assert counts.num_preemptions_by_recompute == 1
assert counts.num_recomputed_tokens == 8

# %% [markdown]
# Step 2 needs two blocks more, one for each, and none is free. So the second request goes, with
# everything it had: eight tokens in two blocks. (`A` is the first request, `B` the second.)

# %%
print(*explain(frames[2], recorder.words), sep="\n")
print(draw_pool(frames[2].snapshot, frames[2].plan))
print(draw_queues(frames[2].snapshot))

assert frames[2].snapshot.preempted == frames[2].snapshot.waiting
assert [len(row.token_ids) for row in frames[2].plan.work] == [1]

# %% [markdown]
# ## What it means
#
# It waits until *all* its tokens fit, and that is when A has ended. In step 5 it is back.

# %%
returned = frames[5]
print(*explain(returned, recorder.words), sep="\n")
print(draw_tables(returned.snapshot))

[row] = returned.plan.work
assert (row.start, len(row.token_ids)) == (0, 7 + 2)
assert [output.outputs[0].text for output in outputs] == undisturbed

# %% [markdown]
# Nine tokens in one step: the prompt's seven and the two that it had said. They are fed side by
# side, like a prompt, and that is much quicker than nine steps of one token. The last of the nine
# gives the next token.
#
# Coming back needs no code of its own. Each sequence has tokens, and `num_computed`, the number of
# those whose keys and values are in the cache. A step feeds tokens that are not computed yet.
# Preemption by recompute frees the blocks and sets `num_computed` to 0. That is all of it.
#
# Both answers are what the requests say in a pool that is large enough.

# %% [markdown]
# ## Break it
#
# Let us forget to set `num_computed` to 0: the blocks go, and the sequence still believes in them.


# %%
def forget_to_reset(group, blocks):
    """As `give_up_blocks`, but every `num_computed` stays as it was."""
    for seq in group.live:
        blocks.free(seq.seq_id)


with patch.object(scheduler_module, "give_up_blocks", forget_to_reset):
    broken = llm.generate(prompts, greedy(5), use_tqdm=False)
print(f"should be: {undisturbed[1]!r}")
print(f"is:        {broken[1].outputs[0].text!r}")

assert broken[0].outputs[0].text == undisturbed[0]  # who stayed is not harmed
assert broken[1].outputs[0].text != undisturbed[1]  # who was put out miscounts
engine.scheduler.check()  # and the books of the pool are in order

# %% [markdown]
# The sequence came back with blocks into which others had written meanwhile, and fed one token
# where it should have fed nine. No error, no crash: a fluent answer that leaves out the *six*.
# `check()` is content too, since every block has its owner. Only a comparison with the right answer
# finds such a bug, so the tests of this library preempt at random and compare.

# %% [markdown]
# ## Exercise
#
# Who must go is a small policy, an object with one method. `running` is in order of arrival; return
# one of them if somebody must go, else `None`. The one in use returns the last.
#
# Write a policy that throws away the least work: of all running groups, the one whose live
# sequences (`group.live`) have the fewest computed tokens (`seq.num_computed`) altogether.


# %%
class MyPolicy:
    def next_victim(self, running, must):
        return ...


def tokens_computed_again(policy):
    """Requests of 7, 4 and 14 tokens in eight blocks: waste, and answers."""
    roomy.llm_engine.scheduler.policy = policy  # or LLM(policy=...)
    before = roomy.get_metrics().counts
    outputs = roomy.generate(
        [prompts[0], "A B C D", "1, 2, 3, 4, 5,"], greedy(4), use_tqdm=False
    )
    again = (
        roomy.get_metrics().counts.num_recomputed_tokens
        - before.num_recomputed_tokens
    )
    return again, [output.outputs[0].text for output in outputs]


latest, expected = tokens_computed_again(PreemptLatest())


def check(policy):
    assert policy.next_victim((), must=False) is None, (
        "nobody has to go, so nobody shall"
    )
    mine, answers = tokens_computed_again(policy)
    assert answers == expected, "a policy decides when, never which"
    assert mine < latest, (
        f"{mine} tokens computed again; the latest-first policy: {latest}"
    )
    print(
        f"right: {mine} tokens computed again, and {latest} if the latest goes"
    )


if MyPolicy().next_victim((), must=False) is not ...:
    check(MyPolicy())

# %% [markdown]
# ## Solution


# %%
class PreemptLeastWork:
    def next_victim(self, running, must):
        if not must:
            return None
        return min(
            running,
            key=lambda group: sum(seq.num_computed for seq in group.live),
        )


check(PreemptLeastWork())

# %% [markdown]
# It saves work, and it is not fair: a short request can be put out again and again by later ones.
# First come, first served has a bound on how long anybody waits (the docstring of
# `scheduling/scheduler.py` derives it).

# %% [markdown]
# ## Where this is in the code
#
# `scheduling/preemption.py`: who. `scheduling/recompute.py`: how, with the sharing of several
# samples kept. `scheduling/admission.py`: when it may come back. In the paper: section 4.5.
#
# Next, 13: the same, but the blocks move to other memory and nothing is computed twice.
