# %% [markdown]
# # 09 · Parallel sampling
#
# Several answers to one prompt cost one prefill and one set of prompt blocks, and each is what it
# is alone.
#
# Fork (tutorial 07) and copy-on-write (08) are all that it takes. A request with `n=3` runs its
# prompt once, draws three first tokens, forks twice, and goes on as three sequences.

# %% [markdown]
# ## Predict
#
# The prompt below has 24 tokens, blocks have four slots, and each answer gets 8 new tokens.
#
# 1. How many tokens does the model compute for `n=3`? And for three separate requests?
# 2. How many blocks are in use at the end? And for three separate requests?

# %% [markdown]
# ## Run

# %%
from rich import print

from minipaged import LLM, SamplingParams
from minipaged.errors import InvalidParameter
from minipaged.show import Recorder

PROMPT = (
    "The old clockmaker of the village by the sea opened shop every "
    "morning at six, and the first thing he did was"
)
recorder = Recorder()
llm = LLM(
    block_size=4,
    num_gpu_blocks_override=32,
    max_model_len=128,
    max_num_batched_tokens=128,
    max_num_seqs=8,
    swap_space=0,
    on_step=recorder,
)
recorder.token_text = llm.llm_engine.tokenizer.token_text


def sampling(n, seed):
    return SamplingParams(n=n, seed=seed, max_tokens=8, ignore_eos=True)


def work_of(prompts, params):
    """The outputs, the tokens computed, and the most blocks in use."""
    recorder.frames.clear()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    computed = sum(frame.plan.num_tokens for frame in recorder.frames)
    blocks = max(frame.snapshot.num_used_blocks for frame in recorder.frames)
    return outputs, computed, blocks


[together], computed, blocks = work_of(PROMPT, sampling(n=3, seed=1))
picture = recorder.draw(8 - 1)
apart, computed_apart, blocks_apart = work_of(
    [PROMPT] * 3, [sampling(n=1, seed=seed) for seed in (1, 2, 3)]
)
num_prompt = len(together.prompt_token_ids)
print(f"n=3:            {computed:>3} tokens computed, {blocks} blocks")
print(
    f"three requests: {computed_apart:>3} tokens computed, {blocks_apart} blocks"
)

assert num_prompt == 24
assert computed == 24 + 3 * 7 and computed_apart == 3 * (24 + 7)
assert blocks == 6 + 3 * 2 and blocks_apart == 3 * 8

# %% [markdown]
# The prompt's 24 tokens are computed once, and its six blocks are there once. Then each answer
# computes seven tokens (the eighth is sampled and not fed), in two blocks of its own.

# %%
print(picture)

# %% [markdown]
# ## The same answers
#
# Three requests with the seeds 1, 2 and 3 are the three samples of one request with the seed 1.
# What a sequence draws depends on its seed, its position, and what the model says, and on nothing
# else: not on who is beside it in the batch.

# %%
for sample, single in zip(together.outputs, apart, strict=True):
    assert sample.token_ids == single.outputs[0].token_ids
    print(f"{sample.index}: …{sample.text!r}")

# %% [markdown]
# ## What part is saved?
#
# The paper measured the blocks saved on conversations of the Alpaca kind with OPT-13B (Figure 15):
# 6.09 % with two samples, 8.53 % with four, 9.79 % with six. That is the prompt's share of all KV,
# which is 12 % there, times (n − 1) / n:

# %%
for n, saved in ((2, 6.09), (4, 8.53), (6, 9.79)):
    share = saved * n / (n - 1)
    print(f"n={n}: saved {saved} %, so the prompt's share is {share:.1f} %")
    assert 11 < share < 12.5  # "12 %" (paper, section 3)

# %% [markdown]
# And here, where the prompt is long beside the answers:

# %%
saving = (blocks_apart - blocks) / blocks_apart
prompt_share = 6 / 8
print(f"saved {saving:.0%} = {prompt_share:.0%} x 2/3")
assert saving == prompt_share * 2 / 3

# %% [markdown]
# ## Predict
#
# One more token at the prompt's end, so that it has 25: how many blocks are copied? And if blocks
# had 32 slots, so that the whole prompt lay in one that is not full: what would be saved?

# %% [markdown]
# ## Break it

# %%
longer = [*together.prompt_token_ids, together.outputs[0].token_ids[0]]
_, _, blocks = work_of({"prompt_token_ids": longer}, sampling(n=3, seed=1))
copies = [copy for frame in recorder.frames for copy in frame.plan.copies]
print(f"25 tokens: {len(copies)} copies, {blocks} blocks")
assert len(copies) == 2
assert blocks == 6 + 3 * 2

llm_32 = LLM(
    block_size=32,
    num_gpu_blocks_override=8,
    max_model_len=128,
    max_num_batched_tokens=128,
    max_num_seqs=8,
    swap_space=0,
    on_step=recorder,
)
recorder.frames.clear()
[large] = llm_32.generate(PROMPT, sampling(n=3, seed=1), use_tqdm=False)
blocks = [frame.snapshot.num_used_blocks for frame in recorder.frames]
print(
    f"blocks of 32: {blocks[0]} block for the prompt, {blocks[-1]} at the end"
)
assert blocks[0] == 1 and blocks[-1] == 3
assert [s.token_ids for s in large.outputs] == [
    s.token_ids for s in together.outputs
]

# %% [markdown]
# With blocks of 32 nothing is shared after the first step: each sample copies the one block that is
# not full. Only *full* blocks stay shared, so large blocks share less. The tokens are the same, as
# always, and the prompt was still computed once.
#
# One kind of request makes no sense at all, and is refused. At temperature 0 every answer is the
# same one.

# %%
try:
    SamplingParams(n=3, temperature=0)
except InvalidParameter as error:
    print(f"InvalidParameter: {error}")
else:
    raise AssertionError("three times the same answer should be refused")

# %% [markdown]
# ## Exercise
#
# A prompt of p tokens, n samples of t new tokens each, blocks of B slots. How many blocks are in
# use at the end? (`-(-a // b)` is division rounded up.)


# %%
def my_blocks(p, n, t, block_size):
    return ...  # a number


def check(num_blocks):
    text = together.prompt_token_ids
    for p, n, t in ((23, 3, 4), (8, 2, 2), (6, 4, 1)):
        params = SamplingParams(n=n, seed=0, max_tokens=t, ignore_eos=True)
        prompt = {"prompt_token_ids": text[:p]}
        measured = work_of(prompt, params)[2]
        answer = num_blocks(p, n, t, 4)
        case = f"p={p}, n={n}, t={t}"
        assert answer == measured, f"{case}: {measured} blocks, not {answer}"
        assert measured <= llm.max_blocks_needed(prompt, params)
    print("right")


if my_blocks(24, 3, 8, 4) is not ...:
    check(my_blocks)

# %% [markdown]
# ## Solution
#
# The full blocks of the prompt once, and for each sample what lies behind them. If there is only
# one new token (t = 1) it is sampled from the prompt's step, nothing is forked, and nothing grows.


# %%
def num_blocks(p, n, t, block_size):
    full = p // block_size
    each = -(-(p + t - 1) // block_size) - full
    return full + (each if t == 1 else n * each)


check(num_blocks)

# %% [markdown]
# ## Where this is in the code
#
# `Sample` in `step.py` says how many tokens a row draws; `LLMEngine` in `engine/llm_engine.py`
# forks; `worker/noise.py` is randomness without a state. In the paper: sections 4.4 and 6.3.
# `python -m minipaged.bench sharing` measures it on your machine.
#
# Next, 10: beam search, where sequences fork and end all the time.
