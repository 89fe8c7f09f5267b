# %% [markdown]
# # 05 · A real Llama on it
#
# The model is told where keys and values lie by a plan of plain numbers, and you can write that
# plan by hand.
#
# In this library a scheduler makes a plan for each step, and a worker applies it. The worker
# decides nothing. So today you are the scheduler, of SmolLM2-135M-Instruct: 30 layers, 9 heads, a
# vocabulary of 49,152 tokens.

# %% [markdown]
# ## Predict
#
# The prompt is "Four score and seven years ago our", seven tokens. You run the model on them, and
# it proposes an eighth. How many tokens must you feed in the next step to get the ninth?

# %% [markdown]
# ## Run
#
# A row of a plan says: feed these tokens, the first of them stands at position `start`, and this is
# the block table. The sampling entry asks for the most probable next token of row 0 (temperature
# 0).

# %%
from rich import print

from minipaged import LLM, SamplingParams
from minipaged.step import Sample, SamplingRules, SequenceWork, StepPlan

llm = LLM(block_size=4, num_gpu_blocks_override=16)
worker, tokenizer = llm.llm_engine.worker, llm.llm_engine.tokenizer
GREEDY = SamplingRules(temperature=0.0)


def run_step(*rows):
    """Rows are (tokens to feed, start, block table). Returns the next token of each."""
    work = tuple(
        SequenceWork(
            number, tuple(tokens), start, tuple(table), table_version=-1
        )
        for number, (tokens, start, table) in enumerate(rows)
    )
    draws = ((0, 0),)  # seed and position: without meaning at temperature 0
    sampling = tuple(Sample(row, draws, GREEDY) for row in range(len(rows)))
    result = worker.execute(StepPlan(0, work, sampling))
    return [draw.token_id for [draw] in result.entries]


prompt = tokenizer.encode("Four score and seven years ago our")
print([tokenizer.decode([token]) for token in prompt])
assert len(prompt) == 7

# %% [markdown]
# The prompt, in blocks 7 and 1. All its keys and values are written in this one step, in all 30
# layers.

# %%
[token] = run_step((prompt, 0, [7, 1]))
print(f"the next token: {tokenizer.decode([token])!r}")

# %% [markdown]
# Now the answer to the question: one. The keys and values of the other seven are in the cache, and
# the new token finds them through the table. Each further step feeds the token that the last one
# gave, at the next position, and where a block border is crossed, you add a block.

# %%
table = [7, 1]
tokens = [*prompt, token]
while len(tokens) < 7 + 8:
    position = len(tokens) - 1
    if position // 4 == len(table):
        table.append({2: 3, 3: 12}[position // 4])  # any block that is free
    [token] = run_step(([tokens[position]], position, table))
    tokens.append(token)
by_hand = tokens[7:]
print(tokenizer.decode(tokens))
print(f"block table {table}")

assert table == [7, 1, 3, 12]

# %% [markdown]
# Is it right? Ask the same weights in Hugging Face's transformers, which keeps keys and values in
# one piece, and then this library's own scheduler, which had other ideas about blocks.

# %%
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
peer = AutoModelForCausalLM.from_pretrained(worker.path, dtype=torch.float32)
generated = peer.generate(
    torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False
)
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
[output] = llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)

assert by_hand == generated[0, 7:].tolist()
assert by_hand == output.outputs[0].token_ids
print("the same eight tokens, three times")

# %% [markdown]
# ## Predict
#
# Eight tokens cost 7 + 7 = 14 tokens of computing: the prompt, and one for each further token. How
# many would it be without a cache, if each step fed all tokens again?

# %% [markdown]
# ## Run

# %%
computed = 0
tokens = list(prompt)
while len(tokens) < 7 + 8:
    [token] = run_step((tokens, 0, [7, 1, 3, 12]))
    computed += len(tokens)
    tokens.append(token)
print(f"{computed} tokens computed")

assert tokens[7:] == by_hand
assert computed == sum(range(7, 15)) == 84

# %% [markdown]
# The same tokens for six times the work, and the factor grows with the length. That is what the
# cache is for, and why it is worth its memory.

# %% [markdown]
# ## Break it
#
# You are the scheduler, so nobody keeps you from a mistake. After three tokens, another request
# comes, and you give it block 1, which the first one still uses.

# %%
tokens = [*prompt, *by_hand[:3]]
run_step((tokens[:-1], 0, [7, 1, 3]))  # all but the newest are in the cache
run_step(
    (tokenizer.encode("The capital of France is"), 0, [1, 5])
)  # the mistake
while len(tokens) < 7 + 8:
    position = len(tokens) - 1
    row = ([tokens[position]], position, [7, 1, 3, 12])
    tokens += run_step(row)
print(f"right: {tokenizer.decode([*prompt, *by_hand])!r}")
print(f"wrong: {tokenizer.decode(tokens)!r}")

assert tokens[7:10] == by_hand[:3]
assert tokens[7:] != by_hand

# %% [markdown]
# No error, no warning: fluent text of another kind. The four tokens of block 1 ("years ago our" and
# one more) were replaced by those of a stranger. In a real service a user would be reading someone
# else's conversation.

# %% [markdown]
# ## Exercise
#
# Serve both requests at the same time, in one batch. Each runs for six tokens beyond its prompt,
# which have seven and five tokens. Choose a block table for each, long enough and without a
# collision; the pool has blocks 0 to 15.

# %%
my_first, my_second = ..., ...  # two lists of block numbers


def check(first, second):
    prompts = [prompt, tokenizer.encode("The capital of France is")]
    tables = [first, second]
    alone = [
        output.outputs[0].token_ids[:6]
        for output in llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            greedy,
            use_tqdm=False,
        )
    ]
    assert [len(ids) for ids in prompts] == [7, 5]
    need = [-(-(len(ids) + 5) // 4) for ids in prompts]  # the last is not fed
    for table, blocks in zip(tables, need, strict=True):
        assert len(table) >= blocks, f"{table} is too short: {blocks} blocks"
    used = [
        block
        for table, n in zip(tables, need, strict=True)
        for block in table[:n]
    ]
    assert len(set(used)) == len(used), "two tokens would share a slot"
    assert all(0 <= block < 16 for block in used), "the pool has blocks 0 to 15"
    rows = [(ids, 0, table) for ids, table in zip(prompts, tables, strict=True)]
    made = [[], []]
    for _ in range(6):
        new = run_step(*rows)
        for mine, token in zip(made, new, strict=True):
            mine.append(token)
        rows = [
            ([token], start + len(fed), table)
            for token, (fed, start, table) in zip(new, rows, strict=True)
        ]
    assert made == alone, "a request got other tokens than it gets alone"
    print("right: each has the tokens that it has alone")


if my_first is not ...:
    check(my_first, my_second)

# %% [markdown]
# ## Solution
#
# Any three different blocks for each, and none in both. Six tokens are made, but the last of them
# is never fed, so 12 and 10 tokens lie in the cache: three blocks each.

# %%
check([7, 1, 3], [5, 2, 0])

# %% [markdown]
# ## Where this is in the code
#
# `step.py` is the plan, with its fields explained; `worker/worker.py` applies it; `model/llama.py`
# is the model. In the paper: section 4.6 (the control message).
#
# Next, 06: the first thing that a scheduler has to know is how a request grows.
