"""Tiny random Llamas against transformers: the same logits, however the work is cut into steps and blocks.

The pools are full of NaN and the block tables shuffled (tests/tiny_llama.py), so agreement means that every read went
to the right slot. The last tests make sure that a wrong one would have shown.
"""

import random
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_llama import SHAPES, PagedPool, random_prompt, run_in_chunks, tiny_llama

BACKENDS = ["reference", "gather"]
PROMPTS = [random_prompt(length, seed=length) for length in (37, 1, 20, 16)]


def largest_error(left, right):
    """The largest difference in two lists of logits. (torch's max keeps a NaN, so a NaN fails every comparison.)"""
    return torch.stack([(a - b).abs().max() for a, b in zip(left, right, strict=True)]).max().item()


@pytest.mark.parametrize("chunk", [None, 7, 1], ids=["whole", "in-chunks", "token-by-token"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers_for_every_shape(shape, backend, chunk):
    tiny = tiny_llama(shape)
    prompts = PROMPTS if backend == "gather" or chunk != 1 else PROMPTS[2:]  # the slow pair gets less
    ours = run_in_chunks(tiny.model(backend), prompts, block_size=5, chunk=chunk)
    assert largest_error(ours, map(tiny.logits, prompts)) < 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", range(1, 33))
def test_logits_are_those_of_transformers_at_every_block_size(block_size, backend):
    tiny = tiny_llama("gqa")
    ours = run_in_chunks(tiny.model(backend), PROMPTS, block_size, chunk=13, seed=block_size)
    assert largest_error(ours, map(tiny.logits, PROMPTS)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("block_size", range(1, 33))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_at_every_block_size_in_every_chunking(shape, block_size):
    tiny = tiny_llama(shape)
    for backend, chunk in (("gather", None), ("gather", 7), ("gather", 1), ("reference", 7)):
        ours = run_in_chunks(tiny.model(backend), PROMPTS, block_size, chunk, seed=block_size)
        assert largest_error(ours, map(tiny.logits, PROMPTS)) < 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_may_be_cast_after_it_was_made(backend):
    tiny = tiny_llama("gqa")
    ours = run_in_chunks(tiny.model(backend, torch.float32).double(), PROMPTS, block_size=5, chunk=7)
    assert largest_error(ours, map(tiny.logits, PROMPTS)) < 1e-4  # its weights were rounded before


@pytest.mark.parametrize("shape", SHAPES)
def test_unpatched_transformers_is_near_too(shape):
    tiny = tiny_llama(shape)
    ours = run_in_chunks(tiny.model("gather"), PROMPTS[:1], block_size=5)
    with torch.inference_mode():
        theirs = tiny.stock(torch.tensor(PROMPTS[:1])).logits
    assert largest_error(ours, theirs) < 1e-5


@given(
    st.sampled_from(["gqa", "mqa", "llama3_rope"]),
    st.integers(1, 32),
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_any_mix_of_prefills_chunks_and_decodes_gives_the_same_logits(shape, block_size, lengths, rng):
    tiny = tiny_llama(shape)
    prompts = [random_prompt(length, seed=i) for i, length in enumerate(lengths)]
    pool = PagedPool(tiny.model("gather"), block_size, num_blocks=80, seed=rng.randrange(1000))
    logits = [[] for _ in prompts]
    remaining = dict(enumerate(prompts))
    while remaining:
        chosen = rng.sample(sorted(remaining), rng.randint(1, len(remaining)))  # in any order
        fed = {i: remaining[i][: rng.choice([1, 1, 5, 20])] for i in chosen}
        for i, new_logits in pool.feed(fed).items():
            logits[i].append(new_logits)
            remaining[i] = remaining[i][len(fed[i]) :]
            if not remaining[i]:
                del remaining[i]
    assert largest_error(map(torch.cat, logits), map(tiny.logits, prompts)) < 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [None, 9], ids=["whole", "in-chunks"])
def test_bfloat16_errs_at_most_half_more_than_transformers_in_bfloat16(backend, chunk):
    prompts = [random_prompt(40, seed) for seed in range(6)]
    our_error = their_error = 0.0
    for seed in range(3):
        tiny = tiny_llama("gqa", seed)
        float32 = run_in_chunks(tiny.model(backend, torch.float32), prompts, 16, chunk)
        ours = run_in_chunks(tiny.model(backend, torch.bfloat16), prompts, 16, chunk)
        half = deepcopy(tiny.stock).bfloat16()
        half.model.rotary_emb.inv_freq = tiny.stock.model.rotary_emb.inv_freq.float()  # as after from_pretrained
        with torch.inference_mode():
            theirs = half(torch.tensor(prompts)).logits.float()
        our_error += (torch.stack(ours) - torch.stack(float32)).square().mean().item()
        their_error += (theirs - torch.stack(float32)).square().mean().item()
    assert 0 < our_error**0.5 <= 1.5 * their_error**0.5


@pytest.mark.parametrize("shape", SHAPES)
def test_tiny_weights_attend(shape):
    """Overwrite the KV of any one token, in any one layer, and the next token's logits move: 99 times of 100."""
    tiny = tiny_llama(shape)
    torch.manual_seed(0)
    changes = []
    for prompt_seed in range(3):
        prompt = random_prompt(24, prompt_seed)
        # As many copies of the prompt as there are cases; in each copy another slot is overwritten.
        cases = [(layer, position) for layer in range(tiny.config.num_layers) for position in range(len(prompt) - 1)]
        pool = PagedPool(tiny.model("gather"), block_size=5, num_blocks=5 * len(cases))
        pool.feed({i: prompt[:-1] for i in range(len(cases))})
        for i, (layer, position) in enumerate(cases):
            for tensor in pool.kv[layer]:
                tensor[pool.slot_of(i, position)] = 2 * torch.randn(tensor.shape[2:], dtype=torch.float64)
        corrupted = pool.feed({i: prompt[-1:] for i in range(len(cases))})
        honest = tiny.logits(prompt)[-1]
        changes += [(logits[0] - honest).abs().max().item() for logits in corrupted.values()]
    assert sum(change > 1e-3 for change in changes) >= 0.99 * len(changes)


def test_a_sequence_reads_no_slot_but_its_own():
    """Another sequence's garbage, and its own unused slots, leave the logits as they are, to the last bit."""
    tiny = tiny_llama("gqa")
    rng = random.Random(0)
    pool = PagedPool(tiny.model("gather"), block_size=5)
    pool.feed({0: PROMPTS[0][:-1], 1: PROMPTS[2], 2: PROMPTS[3]})
    before = pool.feed({0: PROMPTS[0][-1:]})[0]
    own = {pool.slot_of(0, position) for position in range(len(PROMPTS[0]))}
    for layer in pool.kv:
        for block in range(layer.key.shape[0]):
            for offset in range(5):
                if (block, offset) not in own:
                    layer.key[block, offset] = rng.choice([float("inf"), float("nan"), 1e300])
                    layer.value[block, offset] = rng.choice([float("inf"), float("nan"), 1e300])
    pool.num_computed[0] = len(PROMPTS[0]) - 1
    assert torch.equal(pool.feed({0: PROMPTS[0][-1:]})[0], before)
