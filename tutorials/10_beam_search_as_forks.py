# %% [markdown]
# # 10 · Beam search as forks
#
# Each step of a beam search is a few forks and a few frees; the beams share whatever they have in
# common.
#
# Greedy decoding takes the best token and never looks back. Beam search keeps the k best unfinished
# texts, the *beams*. In each step every beam proposes continuations, all proposals are ranked
# together by the sum of their log-probabilities, and the k best run on. So a beam may have two
# successors, or none.

# %% [markdown]
# ## Predict
#
# Three beams run: A "the", B "a", C "one". Their best proposals, with the sum of each:
#
# | from | proposal | sum |
# |---|---|---|
# | B | a dog | −1.0 |
# | B | a (end) | −1.2 |
# | B | a cat | −1.3 |
# | A | the dog | −1.4 |
# | A | the (end) | −1.9 |
# | C | one dog | −2.6 |
#
# Which three beams run on, and what has to be done to memory: which of A, B, C is forked, and which
# is freed?

# %% [markdown]
# ## Run
#
# The rule is a pure function, `advance`. It gets the state and each beam's candidates, and says who
# continues whom.

# %%
from unittest.mock import patch

from rich import print

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.blocks.manager import BlockManager
from minipaged.decoding.beam_search import Beam, BeamRules, BeamState, advance
from minipaged.engine import beam_request
from minipaged.errors import UnknownSequence
from minipaged.show import Recorder, draw_pool, draw_tables, make_snapshot
from minipaged.step import TokenLogprob

WORDS = ["the", "a", "one", "dog", "cat", "(end)"]
THE, A_WORD, ONE, DOG, CAT, END = range(6)
rules = BeamRules(beam_width=3, max_tokens=10, eos_token_ids=(END,))
state = BeamState(
    (Beam((THE,), -0.7, 0), Beam((A_WORD,), -0.9, 0), Beam((ONE,), -1.6, 0))
)
candidates = [  # of each beam: token, log-probability, rank
    [(DOG, -0.7, 1), (END, -1.2, 2)],
    [(DOG, -0.1, 1), (END, -0.3, 2), (CAT, -0.4, 3)],
    [(DOG, -1.0, 1)],
]
candidates = [[TokenLogprob(*best) for best in beam] for beam in candidates]
after = advance(state, candidates, rules)
for beam in after.running:
    text = " ".join(WORDS[token] for token in beam.token_ids)
    print(
        f"{text:<8} {beam.cumulative_logprob:.1f}  child of {'ABC'[beam.parent]}"
    )
for hypothesis in after.finished:
    text = " ".join(WORDS[token] for token in hypothesis.token_ids)
    print(f"{text:<8} finished, score {hypothesis.score:.1f}")

assert [beam.parent for beam in after.running] == [1, 1, 0]
assert [h.token_ids for h in after.finished] == [(A_WORD, END)]

# %% [markdown]
# B has two children, so it is forked. A has one, and goes on in its own blocks. C has none, and is
# freed. "a (end)" is a finished hypothesis; its score is the sum divided by its length. "the (end)"
# is not among the best three, and is dropped.
#
# Now the same on blocks. Each beam holds a prompt of eight tokens, shared, and three tokens of its
# own.

# %%
A, B, C, CHILD = range(4)


def snapshot(manager):
    tables = {seq: table.entries() for seq, table in manager.tables().items()}
    return make_snapshot(manager.block_size, manager.num_blocks, tables)


manager = BlockManager(num_blocks=8, block_size=4)
manager.grow(A, 8)
manager.fork(A, B)
manager.fork(A, C)
for beam in (A, B, C):
    manager.grow(beam, 11)
print(draw_pool(snapshot(manager)))

manager.fork(B, CHILD)
manager.free(C)
copies = [copy for beam in (A, B, CHILD) for copy in manager.grow(beam, 12)]
print(draw_pool(snapshot(manager)))
print(draw_tables(snapshot(manager)))
print(f"copies: {copies}")

assert manager.allocator.ref_counts[:2] == (3, 3)
assert copies == [(3, 5)]
assert manager.allocator.ref_count(4) == 0  # C's own block
manager.check()

# %% [markdown]
# One block copied, one freed. That is Figure 9 of the paper, at a small size.

# %% [markdown]
# ## Predict
#
# With the model: four beams, 12 new tokens. If each beam held blocks of its own, how many blocks
# would be needed, compared with those that are in use? (Two beams can save at most a half, four at
# most three quarters.)

# %% [markdown]
# ## Run

# %%
PROMPT = "Four score and seven years ago our"
recorder = Recorder()
llm = LLM(
    block_size=4,
    num_gpu_blocks_override=24,
    max_model_len=64,
    max_num_batched_tokens=64,
    max_num_seqs=8,
    swap_space=0,
    on_step=recorder,
)
recorder.token_text = llm.llm_engine.tokenizer.token_text


def search(beam_width, max_tokens=12):
    params = BeamSearchParams(
        beam_width=beam_width, max_tokens=max_tokens, ignore_eos=True
    )
    [output] = llm.beam_search(PROMPT, params, use_tqdm=False)
    return output.sequences


verdicts = []  # (beams before, parents of the beams after), step by step


def noting_advance(state, candidates, rules):
    after = advance(state, candidates, rules)
    parents = [beam.parent for beam in after.running]
    verdicts.append((len(state.running), parents))
    return after


with patch.object(beam_request, "advance", noting_advance):
    beams = search(4)
for beam in beams:
    print(f"{beam.cum_logprob:.2f}  {beam.text!r}")
assert len(beams) == 4 and len(verdicts) == 12

# %% [markdown]
# Here is a step in the middle: who begins as a fork, who lets go of its blocks, and what is copied.
# Letters are given in the order of birth: A and B have been dropped by now.

# %%
print(recorder.draw(5))


# %%
def saving(frames):
    """Blocks saved by sharing, over all steps (paper, section 6.3)."""
    tables = [t for f in frames for t in f.snapshot.tables.values()]
    logical = sum(map(len, tables))
    physical = sum(frame.snapshot.num_used_blocks for frame in frames)
    return (logical - physical) / logical


savings = {4: saving(recorder.frames)}
first_search = list(recorder.frames)
for width in (2, 6):
    recorder.frames.clear()
    search(width)
    savings[width] = saving(recorder.frames)
for width, paper in ((2, 37.56), (4, 53.13), (6, 55.16)):
    print(f"{width} beams: {savings[width]:.0%} saved; the paper has {paper} %")
    assert 0.2 < savings[width] < (width - 1) / width
assert savings[2] < savings[4] < savings[6]

# %% [markdown]
# The paper's numbers are for OPT-13B on another workload (Figure 15), so only the size can be
# compared. Beams share much more than samples do: they are not only alike in the prompt, but also
# in what their common ancestors said.

# %% [markdown]
# ## Break it
#
# Forks come before frees. It looks like a matter of taste: why not first free the beams that have
# ended, to have room for the new ones? Suppose B is to have two children and both are to be new
# sequences.

# %%
hasty = BlockManager(num_blocks=8, block_size=4)
hasty.grow(B, 11)
hasty.free(B)
try:
    hasty.fork(B, CHILD)
except UnknownSequence as error:
    print(f"UnknownSequence: {error}")
else:
    raise AssertionError("there was nothing left to fork")

# %% [markdown]
# With B's table go its references, and the blocks may be someone else's before the child can have
# them. A fork needs no free block, so nothing is gained by freeing first.
#
# And without sharing at all? Over contiguous memory a fork is a copy of everything so far. We count
# it from the recorded forks, beside the copies that were really made:

# %%
whole = sum(
    len(event.blocks)
    for frame in first_search
    for event in frame.snapshot.events
    if event.kind == "fork"
)
made = sum(len(frame.plan.copies) for frame in first_search)
print(f"a copy of everything: {whole} blocks; copy-on-write: {made} blocks")
assert made < whole / 2

# %% [markdown]
# One beam is no search: it is greedy decoding, and there is nothing to fork.

# %%
recorder.frames.clear()
[one_beam] = search(1, max_tokens=6)
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
[greedy] = llm.generate(PROMPT, params, use_tqdm=False)
assert one_beam.tokens[7:] == greedy.outputs[0].token_ids
kinds = {e.kind for frame in recorder.frames[:6] for e in frame.snapshot.events}
assert "fork" not in kinds
print(f"one beam and greedy: {greedy.outputs[0].text!r}")

# %% [markdown]
# ## Exercise
#
# A verdict is the list of parents: `[1, 1, 0]` means that the new beams are children of beam 1,
# beam 1 and beam 0. Given that list and the number of beams before, how many forks are needed, and
# how many frees?


# %%
def my_moves(parents, num_before):
    return ...  # (forks, frees)


def check(moves):
    for step, (num_before, parents) in enumerate(verdicts[:-1]):
        events = first_search[step + 1].snapshot.events
        made = tuple(
            sum(event.kind == kind for event in events)
            for kind in ("fork", "free")
        )
        answer = moves(parents, num_before)
        case = f"{num_before} beams, parents {parents}"
        assert answer == made, f"{case}: {made}, not {answer}"
    print("right, for every step of the search")


if my_moves([1, 1, 0], 3) is not ...:
    check(my_moves)

# %% [markdown]
# ## Solution
#
# The first child of a beam goes on in its parent's own sequence; each further child is a fork. A
# beam without a child is freed.


# %%
def moves(parents, num_before):
    with_children = len(set(parents))
    return len(parents) - with_children, num_before - with_children


assert moves([1, 1, 0], 3) == (1, 1)
check(moves)

# %% [markdown]
# ## Where this is in the code
#
# `decoding/beam_search.py` is the rule, `engine/beam_request.py` makes forks and frees of it. In
# the paper: section 4.4, Figure 9; 5.2 (fork, append and free); 6.3.
#
# Next, 11: many requests at once, which come and go at any time.
