# %% [markdown]
# # 19 · From the paper to vLLM today
#
# vLLM kept the blocks and dropped half of the mechanisms around them: one rule and one cache
# replace them.
#
# The paper is from 2023. In January 2025 vLLM announced a new core, called V1, and the old one has
# since been deprecated. Paged blocks, block tables, reference counts, first come first served: all
# that stayed. This is what changed, and where vLLM says so.
#
# | | paper, early vLLM | vLLM V1 | source |
# |---|---|---|---|
# | several samples | fork, copy-on-write | as many requests | `v1/engine/parallel_sampling.py` |
# | block tables | entries are replaced | append-only | docs, *Automatic Prefix Caching* |
# | preemption | recompute or swap | recompute | docs, *vLLM V1* (deprecated features) |
# | beam search | in the engine | on top of it | issue 8306, pull request 9105 |
# | shared prefixes | declared beforehand | found, by default | blog, 27 January 2025 |
# | long prompts | whole | in chunks, by default | docs, *Optimization and Tuning* |
# | a step | either prompts or decodes | any tokens | docs, *vLLM V1* (unified scheduler) |
#
# This library has both sides. Here two of the rows are run both ways: samples and preemption.

# %%
from unittest.mock import patch

from rich import print

from minipaged import LLM, SamplingParams
from minipaged.show import Recorder

V1 = {"enable_prefix_caching": True, "preemption_mode": "recompute"}


def make(num_blocks, **mode):
    recorder = Recorder()
    llm = LLM(
        block_size=4,
        num_gpu_blocks_override=num_blocks,
        max_model_len=32,
        on_step=recorder,
        **mode,
    )
    return llm, recorder


paper, paper_steps = make(24, enable_prefix_caching=False, swap_space=0.01)
v1, v1_steps = make(24, **V1)
prompt = "Four score and seven years ago our"  # 7 tokens


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def tokens_computed(recorder):
    return sum(frame.plan.num_tokens for frame in recorder.frames)


# %% [markdown]
# ## Predict
#
# Three samples of a prompt of seven tokens, blocks of four. In the paper, the prompt is computed
# once, the sequence is forked, and the partial last block is copied when somebody writes into it.
#
# In V1, `n=3` becomes three requests of one sample each, and the prefix cache is what they share:
# full blocks.
#
# * How many block copies on each side?
# * How many prompt tokens are computed on each side?

# %% [markdown]
# ## Run
#
# Sample i of a request with seed 7 draws what a request with seed 7 + i draws. So the answers must
# be the same.


# %%
def samples(n, seed):
    return SamplingParams(n=n, seed=seed, max_tokens=4, ignore_eos=True)


[forked] = paper.generate(prompt, samples(3, seed=7), use_tqdm=False)
one_each = [samples(1, seed) for seed in (7, 8, 9)]
apart = v1.generate([prompt] * 3, one_each, use_tqdm=False)

num_copies, tables = {}, {}
for name, steps in (("fork", paper_steps), ("three requests", v1_steps)):
    num_copies[name] = sum(len(frame.plan.copies) for frame in steps.frames)
    tables[name] = [frame.plan.work[0].block_table for frame in steps.frames]
    print(f"{name}: {tokens_computed(steps)} tokens computed,")
    print(f"  {num_copies[name]} copies; tables of the first: {tables[name]}")

assert [answer.token_ids for answer in forked.outputs] == [
    output.outputs[0].token_ids for output in apart
]
assert num_copies == {"fork": 2, "three requests": 0}
assert tokens_computed(paper_steps) == 7 + 3 * 3
assert tokens_computed(v1_steps) == 7 + 2 * 3 + 3 * 3
assert tables["fork"][:2] == [(0, 1), (0, 2)]
assert tables["three requests"] == [(0, 1), (0, 1), (0, 1, 4), (0, 1, 4)]

# %% [markdown]
# The same answers. V1 computes six tokens more (the partial block, twice), and needs neither fork
# nor copy nor groups of sequences in its scheduler.
#
# Copy-on-write put block 2 in the place of block 1. V1's tables are *append-only*: whoever was told
# of an entry once need not be told again.

# %% [markdown]
# ## Predict
#
# Preemption. The scene of tutorials 12 and 13: four blocks, two requests of seven tokens. The
# second is put out with eight tokens in two full blocks, and comes back with nine tokens. Swapping
# moved two blocks out and in, recomputing fed all nine tokens.
#
# Now recompute *with* the prefix cache. The victim's blocks are free, but the cache knows them. One
# is taken by the first request at once. How many tokens must be computed again?

# %% [markdown]
# ## Run

# %%
again = {}
for name, mode in (("V1", V1), ("recompute", {"preemption_mode": "recompute"})):
    llm, _ = make(4, **mode)
    llm.generate([prompt, "One, two, three, four"], greedy(5), use_tqdm=False)
    again[name] = llm.get_metrics().counts.num_recomputed_tokens
print(f"tokens computed again: {again}")

assert again == {"V1": 4, "recompute": 8}

# %% [markdown]
# Half of what was lost is found again where it lay. The cache does not promise that, and under
# pressure it will often be less. But there is no second pool, no second kind of preemption, no
# order of copies inside a step. vLLM's tuning guide gives the reason in one line: recomputing "has
# lower overhead in the V1 architecture".

# %% [markdown]
# ## What it means
#
# All of this rests on two ideas, and you know both.
#
# **One cache** (tutorial 15): what was computed is found by its content, whether a request beside
# this one computed it or the same request before it was put out.
#
# **One rule** (tutorials 12 and 16): each request has a number of computed tokens, and a step lets
# it catch up. The comment at the top of vLLM's scheduler says that there is no "decoding phase" nor
# "prefill phase". Look at the three requests again: a row of a plan says where it starts and how
# many tokens it feeds. Its name is something that people add.

# %%
rows = [
    [(row.start, len(row.token_ids)) for row in frame.plan.work]
    for frame in v1_steps.frames[:2]
]
print(f"(starts at, feeds): {rows[0]}, then {rows[1]}")

assert rows == [[(0, 7), (4, 3), (4, 3)], [(7, 1), (7, 1), (7, 1)]]

# %% [markdown]
# A prompt, two that begin behind a block which the first one fills *in the same step* (each layer
# writes all keys before it reads any), and then three decodes.
#
# Beam search went the same way. It "initially motivated the idea of PagedAttention", says the RFC
# that proposed to drop it. Today it is a loop on top: in each round every beam is a new request for
# one token. The pull request that built it so (8726) reports 311 tokens a second for the old way,
# 52 for the new one, and 552 for the new one with the prefix cache.

# %% [markdown]
# ## Break it
#
# The new design has its own traps. A sequence whose *every* token is cached has nothing to compute,
# so it never samples. (vLLM met this in issue 3239.) The rule is: look up all tokens but the last.
# Let the look-up see the last one too.

# %%
eight = {"prompt_token_ids": list(range(100, 108))}  # two full blocks
v1.generate(eight, greedy(4), use_tqdm=False)
engine, find = v1.llm_engine, v1.llm_engine.prefixes.find
v1_steps.frames.clear()


def find_all(token_ids, salt):
    return find(eight["prompt_token_ids"], salt)


with patch.object(engine.prefixes, "find", find_all):
    engine.add_request("again", eight, greedy(4))
    for _ in range(5):
        engine.step()
waited = [name for f in v1_steps.frames for name in f.snapshot.waiting]
print(f"{tokens_computed(v1_steps)} tokens computed, waiting: {waited}")

assert tokens_computed(v1_steps) == 0 and waited == ["again"] * 5
engine.scheduler.check()

while engine.has_unfinished_requests():  # with the rule in place it runs
    engine.step()
assert v1_steps.frames[5].plan.num_tokens == 4

# %% [markdown]
# It waits for ever, in an empty engine, and every book is in order. With the rule it computes one
# block again, of which only the last token was needed.

# %% [markdown]
# ## Exercise
#
# V1's way of sampling n answers costs some tokens more than a fork. Write the number of tokens that
# are *computed* altogether, for `n` requests of the same prompt of `length` tokens that arrive
# together, each with `max_tokens` of answer. (An answer's last token is never fed.)


# %%
def my_tokens(length, n, max_tokens, block_size):
    return ...


def count_tokens(length, n, max_tokens):
    """Asks the engine, whose blocks have four tokens."""
    v1.reset_prefix_cache()
    v1_steps.frames.clear()
    same = {"prompt_token_ids": list(range(100, 100 + length))}
    v1.generate([same] * n, greedy(max_tokens), use_tqdm=False)
    return tokens_computed(v1_steps)


def check(formula):
    for case in ((7, 3, 2), (8, 2, 2), (9, 2, 2), (3, 2, 1)):
        counted, said = count_tokens(*case), formula(*case, 4)
        assert said == counted, (
            f"length, n, max_tokens = {case}: {counted} tokens, not {said}"
        )
    print("right")


if my_tokens(7, 3, 2, 4) is not ...:
    check(my_tokens)

# %% [markdown]
# ## Solution
#
# The first request computes its prompt. Each other one finds the full blocks that lie before the
# last token.


# %%
def tokens(length, n, max_tokens, block_size):
    found = (length - 1) // block_size * block_size
    return length + (n - 1) * (length - found) + n * (max_tokens - 1)


check(tokens)

# %% [markdown]
# Was the paper wrong? No. It had no prefix cache, and without one, fork, copy-on-write and swap are
# good answers. Once full blocks are found by their content, most of what they did comes for free,
# and the rest was not worth its weight in code.

# %% [markdown]
# ## Where this is in the code
#
# `blocks/copy_on_write.py`, `blocks/swap.py` and `engine/beam_request.py` are the paper's side;
# `blocks/prefix_cache.py` and `blocks/prefix_sharing.py` V1's; `scheduling/sequence.py` is the one
# rule.
#
# vLLM's side is `vllm/v1/core/`. The sources of the table:
#
# * <https://docs.vllm.ai/en/stable/usage/v1_guide/>
# * <https://docs.vllm.ai/en/latest/design/prefix_caching/>
# * <https://docs.vllm.ai/en/latest/configuration/optimization/>
# * <https://blog.vllm.ai/2025/01/27/v1-alpha-release.html>
# * issues 6226 and 8306, pull requests 8726 and 9105 at <https://github.com/vllm-project/vllm>
#
# This was the last one. `python -m minipaged.watch` shows the scenes, and `make property` tells
# whether a change of yours has lost a token.
