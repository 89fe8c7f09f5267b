"""The compiled backend against the reference, on pools whose unused slots are NaN; and one graph for all of them."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from minipaged.errors import InvalidParameter
from minipaged.model.attention import make_backend
from minipaged.model.attention.compiled import TILE, Tiles
from tests.unit.model.test_attention import (
    Scene,
    check_that_long_sums_stay_in_float16,
    check_that_rows_are_apart,
    close,
)


@pytest.fixture(autouse=True, scope="module")
def no_silent_fallback():
    """Past its limit of recompilations torch would go on in eager mode, in silence: here that is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def test_one_graph_serves_every_batch_every_block_size_and_every_pool():
    before = counters["stats"]["unique_graphs"]
    for rows, block_size in (
        ([(1, 30), (5, 9), (1, 3)], 4),
        ([(1, 0)], 16),  # sizes 0 and 1 are where a graph is easily made anew
        ([(3, 0)], 16),
        ([(1, 1)], 1),
        ([(1, 300), (7, 3), (2, 0)], 50),
        ([(1, n) for n in range(70)], 16),
    ):
        Scene(rows, block_size).run("compiled")
    assert counters["stats"]["unique_graphs"] == before + 1


def test_models_of_several_kinds_may_share_a_process_though_each_is_another_graph():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        for dtype in (torch.float32, torch.float64):
            scene = Scene([(1, 30), (5, 9)], 4, dtype=dtype)
            assert close(scene.run("compiled"), scene.plain(), 1e-5)


ROWS = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 2, 3, 7]), st.integers(0, 50) | st.sampled_from([TILE - 1, TILE, 2 * TILE])),
    min_size=1,
    max_size=6,
)


@given(ROWS, st.sampled_from([1, 3, 4, 16, TILE, 50]), st.integers(0, 99))
@settings(max_examples=max(30, settings.default.max_examples // 3))
@example([(1, 0)], 1, 0)
@example([(5, 0)], 16, 0)
@example([(1, TILE - 1), (3, TILE - 2), (1, TILE)], 16, 0)
def test_compiled_equals_reference_on_any_ragged_batch(rows, block_size, seed):
    scene = Scene(rows, block_size, seed=seed)
    assert close(scene.run("compiled"), scene.run("reference"))


@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (6, 1)], ids=["mha", "mqa"])
def test_compiled_attention_shares_kv_heads_as_the_plain_equation_does(num_heads, num_kv_heads):
    scene = Scene([(1, 3), (5, 2), (1, 40), (3, 0), (1, 7)], 4, num_heads, num_kv_heads)
    assert close(scene.run("compiled"), scene.plain())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_compiled_attention_equals_reference_to_the_precision_of_the_dtype(dtype):
    scene = Scene([(1, 30), (5, 9), (1, 3), (4, 0), (1, 70)], 4, dtype=dtype)
    attended = scene.run("compiled")
    assert attended.dtype == dtype
    assert close(attended, scene.run("reference"), 4 * torch.finfo(dtype).eps)


def test_in_compiled_attention_what_one_row_holds_reaches_no_other_row():
    check_that_rows_are_apart("compiled")


def test_compiled_attention_averages_a_long_context_in_float16_and_does_not_sum_it_first():
    check_that_long_sums_stay_in_float16("compiled")


@given(ROWS, st.integers(1, 32), st.sampled_from([(4, 4), (4, 2), (3, 1)]))
def test_tiles_hold_every_slot_of_every_decode_row_once_a_head_and_pad_with_slots_of_the_row(rows, block_size, heads):
    scene = Scene(rows, block_size, *heads)
    num_heads, num_kv_heads = heads
    tiles = Tiles.of(scene.batch, *heads)
    table, size = scene.batch.block_tables.tolist(), scene.batch.block_size
    decodes = [row for row, length in enumerate(scene.batch.query_lens) if length == 1]
    for bag in range(len(decodes) * num_heads):
        row, head = decodes[bag // num_heads], bag % num_heads
        slots = [table[row][p // size] * size + p % size for p in range(scene.batch.context_lens[row])]
        context = [slot * num_kv_heads + head * num_kv_heads // num_heads for slot in slots]
        own = [tile for tile in tiles.of_bag[:, bag].tolist() if tile != len(tiles.bag) - 1]
        assert [place for tile in own for place in tiles.places[tile, : tiles.filled[tile]].tolist()] == context
        assert set(tiles.places[own].flatten().tolist()) <= set(context)
        assert set(tiles.bag[own].tolist()) == {bag}
        assert own == list(range(tiles.begin[bag] // TILE, tiles.begin[bag] // TILE + len(own)))
    assert tiles.filled[-1] == 0
    assert tiles.bag[-1] == tiles.bag[-2]
    assert set(tiles.places[-1].tolist()) <= set(tiles.places[-2].tolist())
    per_head = sum(-(-scene.batch.context_lens[row] // TILE) for row in decodes) + (not decodes)
    assert len(tiles.bag) == 1 + num_heads * per_head


def test_a_compiled_model_takes_compiled_attention_alone():
    assert make_backend("auto", compiled_model=True).name == "compiled"
    with pytest.raises(InvalidParameter, match="attention_backend = 'gather': with enforce_eager=False"):
        make_backend("gather", compiled_model=True)


def test_a_machine_without_a_compiler_is_told_so():
    with torch._inductor.config.patch("cpp.cxx", ("no-such-compiler",)):
        torch._inductor.cpp_builder.cpp_compiler_search.cache_clear()
        with pytest.raises(InvalidParameter, match=r"attention_backend = 'compiled': needs a C\+\+ compiler"):
            make_backend("compiled")
