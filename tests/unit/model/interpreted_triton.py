"""The Triton backend in Triton's interpreter. test_triton_attention.py runs this file, in a process of its own.

    TRITON_INTERPRET=1 python -m pytest tests/unit/model/interpreted_triton.py

The oracle is `reference` in float64, on the same keys and values. A kernel's launch costs the interpreter milliseconds,
so shapes are tiny, and parts are made short, that there be several.
"""

import dataclasses
import random
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minipaged.engine_args import EngineArgs
from minipaged.errors import InvalidParameter
from minipaged.model.attention import make_backend, triton_decode
from minipaged.model.attention.triton_attend import tile_slots
from minipaged.model.attention.triton_backend import BLOCK_SIZES, DTYPES, HEAD_DIMS
from minipaged.model.kv_layer import KVLayer
from minipaged.sampling_params import SamplingParams
from minipaged.worker.worker import Worker
from tests.property.preempt_at_random import PreemptAtRandom
from tests.property.test_engine_law import run
from tests.tiny_engine import make_engine
from tests.tiny_llama import tiny_llama
from tests.unit.model.test_attention import (
    Scene,
    check_that_long_sums_stay_in_float16,
    check_that_rows_are_apart,
    close,
)

# Outputs are sums of numbers around 1. In a half type the last rounding decides, and that of the weights.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4 * 2**-10, torch.bfloat16: 4 * 2**-7}


def assert_right(scene, attended):
    exact = KVLayer(scene.layer.key.double(), scene.layer.value.double())
    reference = make_backend("reference")
    expected = reference.forward(
        scene.query.double(), exact, reference.prepare(scene.batch, *scene.heads, torch.float64)
    )
    assert attended.dtype == scene.query.dtype
    assert close(attended.double(), expected, TOLERANCE[attended.dtype])


@contextmanager
def parts_of(length, merged_at_once=2):
    """A cut every so many positions, and parts merged two at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_decode, "PART", length)
        patch.setattr(triton_decode, "MERGED_AT_ONCE", merged_at_once)
        yield


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    assert make_backend("triton").is_interpreted, "TRITON_INTERPRET=1 must be in the environment before Python starts"


BORDERS = [14, 15, 16, 17, 30, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129]
ROWS = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 2, 3, 17, 33]), st.integers(0, 50) | st.sampled_from(BORDERS)),
    min_size=1,
    max_size=4,
)


@given(
    ROWS,
    st.sampled_from([16, 32]),
    st.sampled_from([(1, 1), (2, 2), (3, 1), (6, 2), (4, 1)]),
    st.sampled_from(HEAD_DIMS[:3]),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
@settings(max_examples=max(40, settings.default.max_examples // 2))
@example([(1, 31), (1, 32), (1, 33), (1, 0)], 16, (3, 1), 64, torch.float32, 0)
@example([(33, 0), (17, 31), (2, 63)], 32, (6, 2), 64, torch.float32, 0)
def test_triton_equals_reference_on_any_ragged_batch(rows, block_size, heads, head_dim, dtype, seed):
    scene = Scene(rows, block_size, *heads, head_dim=head_dim, dtype=dtype, seed=seed)
    with parts_of(32):
        assert_right(scene, scene.run("triton"))


EACH = list(zip(BLOCK_SIZES + BLOCK_SIZES[:1], HEAD_DIMS, DTYPES + DTYPES[:2], strict=True))
ALL = [(b, d, t) for b in BLOCK_SIZES for d in HEAD_DIMS for t in DTYPES]


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype"), EACH + [pytest.param(*c, marks=pytest.mark.slow) for c in ALL if c not in EACH]
)
def test_every_block_size_head_dim_and_dtype_is_right(block_size, head_dim, dtype):
    scene = Scene([(1, 300), (5, 130), (1, 7), (20, 0)], block_size, 4, 1, head_dim, dtype)
    assert_right(scene, scene.run("triton"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_the_same_bits_in_any_company(dtype):
    rows = [(1, 70), (6, 40), (1, 5), (1, 150)]
    together = Scene(rows, 16, 6, 2, 64, dtype)
    with parts_of(64):
        attended = together.run("triton").split(together.batch.query_lens)
        for i, (fed, before) in enumerate(rows):
            alone = Scene([(fed, before)], 16, 6, 2, 64, dtype)
            table = together.batch.block_tables[i, : alone.batch.block_tables.shape[1]]
            alone.layer.key[alone.batch.block_tables[0]] = together.layer.key[table]
            alone.layer.value[alone.batch.block_tables[0]] = together.layer.value[table]
            alone.query = together.query.split(together.batch.query_lens)[i]
            assert torch.equal(alone.run("triton"), attended[i])


def test_what_one_row_holds_reaches_no_other_row():
    check_that_rows_are_apart("triton", block_size=16, head_dim=64, dtype=torch.float32, tolerance=1e-5)


def test_a_long_context_in_float16_is_averaged_and_not_summed_first():
    check_that_long_sums_stay_in_float16("triton", head_dim=64)


def test_what_pads_a_block_table_is_not_read():
    scene = Scene([(1, 3), (1, 100), (4, 20)], 16, 2, 1, 64, torch.float32)
    tables = scene.batch.block_tables
    nobodys = next(block for block in range(len(scene.layer.key)) if block not in tables)  # its slots are NaN
    needed = torch.tensor([-(-length // 16) for length in scene.batch.context_lens])
    padded = torch.where(torch.arange(tables.shape[1]) < needed[:, None], tables, nobodys)
    scene.batch = dataclasses.replace(scene.batch, block_tables=padded)
    assert_right(scene, scene.run("triton"))


def test_a_pool_may_have_more_elements_than_an_int32_can_count():
    """Eight GiB that are asked for and never touched, but for three blocks at the end."""
    block_size, head_dim = 16, 64
    num_blocks = 2**31 // (block_size * head_dim) + 8
    small = Scene([(1, 20)], block_size, 2, 1, head_dim, torch.float16)
    layer = KVLayer(*(torch.empty(num_blocks, block_size, 1, head_dim, dtype=torch.float16) for _ in range(2)))
    far = torch.tensor([[num_blocks - 1, num_blocks - 3]])
    table = small.batch.block_tables[0]
    backend = make_backend("triton")
    for block, place in zip(table, far[0], strict=True):
        slots = place * block_size + torch.arange(block_size)
        backend.write(layer, small.layer.key[block], small.layer.value[block], slots)
        assert torch.equal(layer.key[place].isnan(), small.layer.key[block].isnan())
    batch = dataclasses.replace(small.batch, block_tables=far)
    assert_right(small, backend.forward(small.query, layer, backend.prepare(batch, *small.heads, torch.float16)))


@given(
    st.lists(st.integers(0, 4 * 16 - 1), unique=True, min_size=1, max_size=9),
    st.sampled_from([(1, 64), (3, 80), (5, 256), (3, 96)]),
    st.sampled_from(DTYPES),
)
@settings(max_examples=max(20, settings.default.max_examples // 5))
def test_keys_and_values_go_into_their_slots_and_nowhere_else(slots, heads, dtype):
    torch.manual_seed(0)
    written, expected = (KVLayer(*torch.full((2, 4, 16, *heads), float("nan"), dtype=dtype)) for _ in range(2))
    key, value = torch.randn(2, len(slots), *heads).to(dtype)
    make_backend("triton").write(written, key, value, torch.tensor(slots))
    expected.write(key, value, torch.tensor(slots))
    for ours, theirs in zip(written, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=9))
def test_a_context_is_cut_at_multiples_of_a_parts_length_whatever_else_is_in_the_batch(context_lens):
    for length in context_lens:
        assert (triton_decode.num_parts(length) - 1) * triton_decode.PART < length
        assert triton_decode.num_parts(length) * triton_decode.PART >= length
    rows = [(1, length - 1) for length in context_lens] + [(3, 5)]
    scene = Scene(rows, 128, 1, 1, 1, torch.float16)
    work = triton_decode.DecodeParts.of(scene.batch)
    width = scene.batch.block_tables.shape[1]
    assert work.parts.tolist() == [
        [row, row * width, begin, length]
        for row, length in enumerate(context_lens)
        for begin in range(0, length, triton_decode.PART)
    ]
    for token, first, count in work.merges.tolist():
        assert count == triton_decode.num_parts(context_lens[token]) > 1
        assert [part[0] for part in work.parts[first : first + count].tolist()] == [token] * count
    assert len(work.merges) == sum(length > triton_decode.PART for length in context_lens)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_tiles_divide_blocks_and_blocks_divide_parts(block_size, head_dim):
    for dtype in DTYPES:
        tile = tile_slots(block_size, head_dim, dtype.itemsize)
        assert tile >= 16
        assert block_size % tile == 0
    assert triton_decode.PART % block_size == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 24}, "block_size = 24: attention_backend='triton' takes 16, 32, 64, 128"),
        ({"block_size": 8}, "block_size = 8: attention_backend='triton' takes 16, 32, 64, 128"),
        ({"head_dim": 48}, "head_dim = 48: attention_backend='triton' takes 64, 80, 96, 128, 256"),
        ({"dtype": "float64"}, "dtype = 'float64': attention_backend='triton' takes float16, bfloat16, float32"),
        ({"enforce_eager": False}, "attention_backend = 'triton': with enforce_eager=False choose auto or compiled"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name_before_any_weight_is_read(tmp_path, changes, message):
    directory = tiny_llama("gqa", head_dim=changes.pop("head_dim", 64)).save(tmp_path)
    (directory / "model.safetensors").unlink()
    args = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, **changes}
    with pytest.raises(InvalidParameter) as refusal:
        Worker(EngineArgs(directory, attention_backend="triton", **args))
    assert str(refusal.value) == message


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_an_engine_gives_the_tokens_of_gather_under_preemption(tmp_path, mode):
    directory = tiny_llama("gqa", head_dim=64).save(tmp_path)
    rng = random.Random(0)
    prompts = [rng.choices(range(61), k=length) for length in (15, 40, 30)]
    params = [SamplingParams(n=n, temperature=t, seed=7, max_tokens=6) for n, t in ((1, 0), (2, 1), (1, 0))]
    tokens = {}
    for backend in ("gather", "triton"):
        engine = make_engine(
            directory,
            num_blocks=7,
            policy=PreemptAtRandom(0, 0.3),
            num_host_blocks=6,
            dtype="float32",
            max_num_seqs=5,
            max_num_batched_tokens=30,
            attention_backend=backend,
            preemption_mode=mode,
        )
        with parts_of(16):
            done = run(engine, list(zip(prompts, params, strict=True)))
        counts = engine.get_metrics().counts
        assert counts.num_preemptions_by_swap + counts.num_preemptions_by_recompute > 1
        tokens[backend] = [[answer.token_ids for answer in output.outputs] for output in done]
    assert tokens["triton"] == tokens["gather"]
