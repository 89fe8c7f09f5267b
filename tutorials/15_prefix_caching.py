# %% [markdown]
# # 15 · Prefix caching and eviction
#
# A full block outlives its request, so that a later prompt with the same beginning need not compute
# it.
#
# Thousands of requests begin alike: a system prompt, a document, the earlier turns of a chat. The
# keys and values of a token depend on all tokens before it and on nothing after it. So two prompts
# with the same beginning have the same keys and values there, and one set of blocks serves both
# (paper, section 4.4, "shared prefix").
#
# With `enable_prefix_caching=True`, a block that nobody references any more stays where it is,
# *cached*. It counts as free, and is used for something else only when there is no other.

# %%
from unittest.mock import patch

from rich import print

from minipaged import LLM, SamplingParams
from minipaged.blocks.eviction import EvictFewestHits, EvictLeastRecentlyUsed
from minipaged.blocks.prefix_cache import PrefixCache, block_key
from minipaged.errors import InvariantBroken
from minipaged.show import Recorder, draw_pool, explain

recorder = Recorder()


def make(**args):
    return LLM(
        block_size=4,
        num_gpu_blocks_override=12,
        max_model_len=48,
        enable_prefix_caching=True,
        preemption_mode="recompute",
        on_step=recorder,
        **args,
    )


def greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


llm = make()
engine = llm.llm_engine
recorder.token_text = engine.tokenizer.token_text

system = (  # 16 tokens
    "You are a friendly guide. "
    "You answer every question in a single short sentence."
)
who = system + " Who are you?"  # 20 tokens
where = system + " Where is Paris?"  # 20 tokens
fox = (  # 28 tokens
    "The quick brown fox jumps over the lazy dog, and the dog, "
    "who was not as lazy as all that, got up and ran after"
)
count = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,"  # 30 tokens


def ask(prompt, max_tokens=2):
    """One request, and one more step that shows what it leaves behind."""
    recorder.frames.clear()
    [output] = llm.generate(prompt, greedy(max_tokens), use_tqdm=False)
    engine.step()
    return output


# %% [markdown]
# ## Predict
#
# The pool has twelve blocks of four tokens. First comes `who`, 20 tokens, alone. Then `where`,
# which has the first 16 in common with it. Then `who` once more, the very same 20 tokens.
#
# How many tokens does each of the three find in the cache?

# %% [markdown]
# ## Run

# %%
first = ask(who)
print(draw_pool(recorder.frames[-1].snapshot))

assert first.num_cached_tokens == 0
assert engine.blocks.num_free == 12  # all blocks are free,
assert len(recorder.frames[-1].snapshot.cached) == 5  # and five are kept

# %% [markdown]
# The prompt's five blocks are full, and marked `~`: cached. The sixth block held one generated
# token. A partial block is of no use to others, since it would still be written, so it is just
# free.

# %%
second = ask(where)
print(*explain(recorder.frames[0], recorder.words), sep="\n")

assert second.num_cached_tokens == 16
assert recorder.frames[0].plan.num_tokens == 4

third = ask(who)
print(
    f"the same prompt again: {third.num_cached_tokens}"
    f" of {len(third.prompt_token_ids)} tokens were cached"
)
assert third.num_cached_tokens == 16
assert third.outputs[0].text == first.outputs[0].text

# %% [markdown]
# The second prompt feeds four tokens instead of twenty.
#
# The third could have found all twenty, and takes sixteen. To sample, the model needs the logits of
# the last token, and logits are not cached. So at least one token must be computed, and since
# blocks are taken whole, that is a block of four.

# %% [markdown]
# ## What it means
#
# How is a block found? It has a **key**, a hash of its own four tokens *and of the key of the block
# before it*. So a key stands for the whole beginning up to its block, and the same four tokens
# behind another beginning have another key.

# %%
root = PrefixCache(4).root("").key  # before the first block
once = block_key(block_key(root, (1, 2, 3, 4)), (5, 6, 7, 8))
again = block_key(block_key(root, (1, 2, 3, 4)), (5, 6, 7, 8))
other = block_key(block_key(root, (9, 2, 3, 4)), (5, 6, 7, 8))
print(f"{once.hex()}\n{again.hex()}\n{other.hex()}")

assert once == again != other

# %% [markdown]
# A search begins at the first block, takes one look-up for each block, and ends at the first one
# that is not there.

# %% [markdown]
# ## Predict
#
# The cache holds six blocks now. A prompt of 28 tokens arrives. With its answer it needs eight
# blocks, and six are not cached. So two cached ones must be given up. Which two would you choose?

# %% [markdown]
# ## Run

# %%
system_blocks = recorder.frames[0].plan.work[0].block_table[:4]
ask(fox)
evicted = []
for frame in recorder.frames:
    for event in frame.snapshot.events:
        if event.kind == "evict":
            evicted += event.blocks
print(f"the system prompt is in blocks {system_blocks}; evicted: {evicted}")

assert len(evicted) == 2
assert not set(evicted) & set(system_blocks)
assert ask(where).num_cached_tokens == 16

# %% [markdown]
# The two that end the questions go, and the system prompt stays. The rule behind it has two parts:
#
# * Least recently used first. Who lost its last reference first goes first.
# * A request lets go of its blocks from the last to the first. So within a request the tail goes
# before the head: without the head, the search would end before it gets to the blocks behind it.

# %% [markdown]
# ## Break it
#
# Evicting means two things: the block is handed out, and the cache forgets what it held. Leave out
# the second. (This was a bug in vLLM once: its issue 4761.)

# %%
llm.reset_prefix_cache()
right = ask(count, max_tokens=6).outputs[0].text

with patch.object(PrefixCache, "forget", lambda cache, block: None):
    ask(fox)
    ask(where)
    wrong = ask(count, max_tokens=6)
print("should be:", right)
print("is:       ", wrong.outputs[0].text)

assert wrong.num_cached_tokens > 0
assert wrong.outputs[0].text != right

try:
    engine.scheduler.check()
    complaint = "no complaint"
except InvariantBroken as error:
    complaint = str(error)
print(complaint)
assert "keys with a block" in complaint

# %% [markdown]
# The cache finds its old key, and behind it stands a block that holds the fox by now. In a server
# that is worse than a wrong answer: it is another user's text. `check()` names the equation: each
# key has one block, and each block one key.

# %% [markdown]
# ## Exercise
#
# A long document that somebody reads once pushes everything else out: the order of last use does
# not know how *often* a block was wanted. Write a policy that evicts the block with the fewest
# hits; among equals, the one released first.
#
# `self._blocks` is a dict of the evictable blocks in their order of release, and `self.hits` counts
# the hits of a block. Choose one, take it out of both, and return it.


# %%
class MyPolicy(EvictLeastRecentlyUsed):
    def __init__(self):
        super().__init__()
        self.hits = {}

    def reuse(self, block, is_hit):  # called when the block is hit
        super().reuse(block, is_hit)
        self.hits[block] = self.hits.get(block, 0) + is_hit

    def evict(self):
        return ...


def still_cached(policy):
    """What `who` finds after the two questions and two long documents."""
    llm = make(eviction_policy=policy)
    for prompt in (who, where, fox, count):
        llm.generate(prompt, greedy(1), use_tqdm=False)
    [output] = llm.generate(who, greedy(1), use_tqdm=False)
    llm.llm_engine.scheduler.check()
    return output.num_cached_tokens


def check(policy_class):
    found = still_cached(policy_class())
    assert found == 16, (
        f"{found} tokens of the system prompt are left, which was hit once;"
        " the documents were never hit"
    )
    print(f"right: {found} tokens are still cached")


print(f"least recently used: {still_cached(EvictLeastRecentlyUsed())} tokens")
trial = MyPolicy()
trial.release(0)
if trial.evict() is not ...:
    check(MyPolicy)

# %% [markdown]
# ## Solution


# %%
class EvictSeldomHit(MyPolicy):
    def evict(self):
        block = min(self._blocks, key=lambda block: self.hits.get(block, 0))
        del self._blocks[block]
        self.hits.pop(block, None)  # it will hold something else
        return block


check(EvictSeldomHit)
check(EvictFewestHits)  # the library has the same one, as an example

# %% [markdown]
# `min` takes the first of equals, and a dict keeps its order, so among equals the one released
# first goes.
#
# If you know beforehand which prefix matters, you need no policy: `llm.pin_prefix(prompt)` holds
# its blocks until you let go, which is how the paper describes shared prefixes.

# %% [markdown]
# ## Where this is in the code
#
# `blocks/prefix_cache.py`: from content to block, by a chain of hashes, each hit compared with the
# tokens. `blocks/prefix_sharing.py`: how a sequence begins with such blocks. `blocks/eviction.py`:
# who goes. Paper: section 4.4.
#
# Next, 16: a long prompt that does not hold up everybody else.
