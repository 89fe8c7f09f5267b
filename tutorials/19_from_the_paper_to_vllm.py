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
# This library has both sides. Each change is shown here by running it both ways.

# %%
from unittest.mock import patch

from rich import print

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.blocks.prefix_cache import PrefixCache, block_key
from minipaged.decoding.beam_search import BeamRules, BeamState, advance
from minipaged.show import Recorder, draw_pool, explain
from minipaged.step import TokenLogprob

PAPER = {"enable_prefix_caching": False}
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
    recorder.token_text = llm.llm_engine.tokenizer.token_text
    return llm, recorder


paper, paper_steps = make(24, swap_space=0.01, **PAPER)
v1, v1_steps = make(24, **V1)
prompt = "Four score and seven years ago our"  # 7 tokens


def tokens_computed(recorder):
    return sum(frame.plan.num_tokens for frame in recorder.frames)


def num_copies(recorder):
    return sum(len(frame.plan.copies) for frame in recorder.frames)


def most_blocks(recorder):
    return max(frame.snapshot.num_used_blocks for frame in recorder.frames)


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
common = {"max_tokens": 4, "ignore_eos": True}
[forked] = paper.generate(
    prompt, SamplingParams(n=3, seed=7, **common), use_tqdm=False
)
apart = v1.generate(
    [prompt] * 3,
    [SamplingParams(seed=7 + i, **common) for i in range(3)],
    use_tqdm=False,
)

for name, steps in (("fork", paper_steps), ("three requests", v1_steps)):
    print(
        f"{name:15} tokens computed {tokens_computed(steps):3}"
        f"   block copies {num_copies(steps)}"
        f"   blocks at most {most_blocks(steps)}"
    )

assert [answer.token_ids for answer in forked.outputs] == [
    output.outputs[0].token_ids for output in apart
]
assert (tokens_computed(paper_steps), num_copies(paper_steps)) == (7 + 3 * 3, 2)
assert (tokens_computed(v1_steps), num_copies(v1_steps)) == (
    7 + 2 * 3 + 3 * 3,
    0,
)
assert most_blocks(paper_steps) == most_blocks(v1_steps) == 1 + 3 * 2

# %% [markdown]
# The same answers in the same number of blocks. V1 computes six tokens more (the partial block,
# twice), and needs neither fork nor copy nor groups of sequences in its scheduler.
#
# Here is the first step of the three. Two of them begin with a block that the first one fills *in
# the same step*.

# %%
print(*explain(v1_steps.frames[0], v1_steps.words)[:6], sep="\n")
print(draw_pool(v1_steps.frames[0].snapshot))


def is_append_only(recorder):
    """Whether each sequence's block table only ever grew at its end."""
    last = {}
    for frame in recorder.frames:
        for row in frame.plan.work:
            before = last.get(row.seq_id, ())
            if row.block_table[: len(before)] != before:
                return False
            last[row.seq_id] = row.block_table
    return True


assert not is_append_only(paper_steps)  # copy-on-write replaces an entry
assert is_append_only(v1_steps)

# %% [markdown]
# An append-only table is worth something: whoever was told of a block once need not be told again.
#
# It has a price too. Let the same request come twice. Its second block is filled by decoding, and
# the second time the cache has that content already. The old engine would have changed the table to
# the block that is there. V1 keeps both blocks until the request ends, and so does this library.

# %%
v1_steps.frames.clear()
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
v1.generate([prompt, prompt], greedy, use_tqdm=False)
tables = [row.block_table for row in v1_steps.frames[-1].plan.work]
print(f"the tables of two equal requests: {tables[0]} and {tables[1]}")

assert tables[0][0] == tables[1][0]  # full when it was asked for: shared
assert tables[0][1] != tables[1][1]  # became full later: twice in the pool
assert is_append_only(v1_steps)

# %% [markdown]
# ## Predict
#
# Preemption. The scene of tutorials 12 and 13: four blocks, two requests of seven tokens. The
# second is put out with eight tokens in two full blocks, and comes back with nine tokens. Swapping
# moved two blocks out and in, recomputing fed all nine tokens.
#
# Now recompute *with* the prefix cache. The victim's blocks are free, but the cache knows them. One
# is taken by the first request at once. How many tokens are fed when the victim is back?

# %% [markdown]
# ## Run

# %%
counts = {}
modes = {
    "swap": {"preemption_mode": "swap", "swap_space": 0.01},
    "recompute": {"preemption_mode": "recompute"},
    "V1": V1,
}
for name, mode in modes.items():
    llm, steps = make(4, **mode)
    llm.generate(
        [prompt, "One, two, three, four"],
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
        False,
    )
    count = counts[name] = llm.get_metrics().counts
    moved = count.num_blocks_swapped_out + count.num_blocks_swapped_in
    print(
        f"{name:10} computed again: {count.num_recomputed_tokens} tokens,"
        f" blocks moved: {moved}"
    )

assert (
    counts["swap"].num_blocks_swapped_out == 2
    and counts["swap"].num_recomputed_tokens == 0
)
assert counts["recompute"].num_recomputed_tokens == 8
assert counts["V1"].num_recomputed_tokens == 4

# %% [markdown]
# Half of what was lost is found again where it lay. The cache does not promise that, and under
# pressure it will often be less. But the request never waits for a copy over the bus, and there is
# no second pool, no second kind of preemption, no order of copies inside a step. vLLM's tuning
# guide gives the reason in one line: recomputing "has lower overhead in the V1 architecture".

# %% [markdown]
# ## Predict
#
# Beam search. The RFC that proposed to drop it says that beam search "initially motivated the idea
# of PagedAttention", and that it makes everything else more complicated. Today `LLM.beam_search` in
# vLLM is a loop on top: in each round it sends every beam as a new request for one token, and
# chooses among the answers.
#
# Without a cache each round computes every beam from its first token. For three beams of five
# tokens after our prompt of seven: how many tokens are computed inside the engine, how many from
# outside?

# %% [markdown]
# ## Run
#
# The choice is the library's own pure function, `decoding.beam_search.advance`. Inside the engine
# its verdicts become forks. Out here they are only lists of tokens.


# %%
def beams_from_outside(llm, rules):
    tokenizer = llm.llm_engine.tokenizer
    one_more = SamplingParams(
        temperature=0,
        max_tokens=1,
        logprobs=rules.num_candidates,
        ignore_eos=True,
    )
    state, token_ids = BeamState(), list(tokenizer.encode(prompt))
    while not state.is_over:
        requests = [
            {"prompt_token_ids": token_ids + list(beam.token_ids)}
            for beam in state.running
        ]
        candidates = []
        for output in llm.generate(requests, one_more, use_tqdm=False):
            [ranked] = output.outputs[0].logprobs
            best = [
                TokenLogprob(token_id, entry.logprob, entry.rank)
                for token_id, entry in ranked.items()
            ]
            candidates.append(sorted(best, key=lambda token: token.rank))
        state = advance(state, candidates, rules)
    return [list(hypothesis.token_ids) for hypothesis in state.finished]


width, length = 3, 5
rules = BeamRules(beam_width=width, max_tokens=length)
paper_steps.frames.clear()
[searched] = paper.beam_search(
    prompt, BeamSearchParams(width, length, ignore_eos=True), use_tqdm=False
)
inside = [beam.tokens[7:] for beam in searched.sequences]
computed = {"inside the engine": tokens_computed(paper_steps)}
for name, llm, steps in (
    ("outside", paper, paper_steps),
    ("outside, with the cache", v1, v1_steps),
):
    v1.reset_prefix_cache()
    steps.frames.clear()
    assert beams_from_outside(llm, rules) == inside
    computed[name] = tokens_computed(steps)
for name, count in computed.items():
    print(f"{name:25} {count:4} tokens computed")

assert computed["inside the engine"] == 7 + width * (length - 1)
assert computed["outside"] == 7 + sum(
    width * (7 + generated) for generated in range(1, length)
)
assert (
    computed["inside the engine"]
    < computed["outside, with the cache"]
    < computed["outside"]
)

# %% [markdown]
# The same beams three times. The prefix cache takes most of the price away, and the longer the
# beams, the more of it: what is lost is at most a partial block for each beam and round.
#
# vLLM saw the same pattern. The pull request that rebuilt beam search on top of the core (8726)
# reports 311 tokens a second for the old way, 52 from outside, and 552 from outside with the prefix
# cache. (Why the last one is even more than the first, a count of tokens cannot tell.)

# %% [markdown]
# ## What it means
#
# All of this rests on two ideas, and you know both.
#
# **One rule.** The comment at the top of vLLM's scheduler says that there is no "decoding phase"
# nor "prefill phase": each request has a number of computed tokens, and a step lets it catch up.
# Here it is in one table. A row of a plan says where it starts and how many tokens it feeds; its
# name is something that people add.

# %%
v1_steps.frames.clear()
v1.reset_prefix_cache()
engine = v1.llm_engine
engine.add_request("decode", "One, two, three,", greedy)
engine.step()
engine.add_request("cached", "One, two, three, go", greedy)
engine.add_request("prefill", prompt, greedy)
engine.step()
for row in v1_steps.frames[-1].plan.work:
    print(f"starts at {row.start}, feeds {len(row.token_ids)}")
assert [
    (row.start, len(row.token_ids)) for row in v1_steps.frames[-1].plan.work
] == [(6, 1), (4, 3), (0, 7)]
while engine.has_unfinished_requests():
    engine.step()

# %% [markdown]
# **One chain.** A block's key is a hash of its own tokens and of its parent's key. So one key
# stands for the whole beginning, and finding a prefix takes one look-up for each block.

# %%
key = PrefixCache(4).root("").key
for block in ((1, 2, 3, 4), (5, 6, 7, 8)):
    key = block_key(key, block)
    print(f"{block}  {key.hex()}")

other = block_key(PrefixCache(4).root("").key, (9, 2, 3, 4))
assert (
    block_key(other, (5, 6, 7, 8)) != key
)  # the same block after another beginning is another block

# %% [markdown]
# ## Break it
#
# The new design has its own traps. A sequence whose *every* token is cached has nothing to compute,
# so it never samples. (vLLM met this in issue 3239.) The rule is: look up all tokens but the last.
# Let the look-up see the last one too.

# %%
eight = {"prompt_token_ids": list(range(100, 108))}  # two full blocks
v1.generate(eight, greedy, use_tqdm=False)
find = engine.prefixes.find
v1_steps.frames.clear()

with patch.object(
    engine.prefixes,
    "find",
    lambda token_ids, salt: find(eight["prompt_token_ids"], salt),
):
    engine.add_request("again", eight, greedy)
    for _ in range(5):
        engine.step()
waited = [frame.snapshot.waiting for frame in v1_steps.frames]
print(
    f"five steps, {tokens_computed(v1_steps)} tokens computed,"
    f" waiting: {waited[-1]}"
)

assert tokens_computed(v1_steps) == 0 and waited == [("again",)] * 5
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
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True
    )
    v1.generate(
        [{"prompt_token_ids": list(range(100, 100 + length))}] * n,
        params,
        use_tqdm=False,
    )
    return tokens_computed(v1_steps)


def check(formula):
    for case in ((7, 3, 2), (8, 2, 2), (9, 2, 2), (3, 2, 1)):
        counted, said = count_tokens(*case), formula(*case, 4)
        assert said == counted, (
            f"length, n, max_tokens = {case}: {counted} tokens are computed, "
            f"you say {said}"
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
# Was the paper wrong? No. It had no prefix cache, and in its setting fork, copy-on-write and swap
# are the best answers to what they answer. Once full blocks are found by their content, most of
# what they did comes for free, and the rest was not worth its weight in code. You can only see that
# if you have both.

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
