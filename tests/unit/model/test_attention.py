"""The attention backends: against the plain equation, against each other, on pools whose unused slots are NaN."""

import random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from minipaged.errors import InvalidParameter
from minipaged.model.attention import gather, make_backend
from minipaged.model.attention.gather import group_by_length
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer
from minipaged.step import SequenceWork


class Scene:
    """Random queries, keys and values of a ragged batch; the keys and values lie in a pool that is NaN elsewhere."""

    def __init__(self, rows, block_size, num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float64, seed=0):
        """`rows` are pairs (tokens fed, tokens before them)."""
        torch.manual_seed(seed)
        table_lens = [-(-(fed + before) // block_size) for fed, before in rows]
        blocks = list(range(sum(table_lens) + 2))
        random.Random(seed).shuffle(blocks)
        shape = (len(blocks), block_size, num_kv_heads, head_dim)
        self.layer = KVLayer(*(torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)))
        self.rows, self.heads = rows, (num_heads, num_kv_heads)
        self.query = torch.randn(sum(fed for fed, _ in rows), num_heads, head_dim, dtype=dtype)
        self.keys, self.values, works = [], [], []
        for fed, before in rows:
            table = tuple(blocks.pop() for _ in range(-(-(fed + before) // block_size)))
            key, value = torch.randn(2, fed + before, num_kv_heads, head_dim, dtype=dtype)
            slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(fed + before)])
            self.layer.write(key, value, slots)
            self.keys.append(key)
            self.values.append(value)
            works.append(SequenceWork(0, (0,) * fed, before, table, table_version=0))
        self.batch = RaggedBatch.build(works, block_size, "cpu")

    def prepared(self, backend):
        return backend.prepare(self.batch, *self.heads, self.query.dtype)

    def run(self, name):
        backend = make_backend(name)
        return backend.forward(self.query, self.layer, self.prepared(backend))

    def plain(self):
        """softmax(q · k / sqrt(D)) · v on contiguous keys and values, one query and one head at a time."""
        output = torch.empty_like(self.query)
        token = 0
        for (fed, before), key, value in zip(self.rows, self.keys, self.values, strict=True):
            for i in range(fed):
                for head in range(self.query.shape[1]):
                    shared = head * key.shape[1] // self.query.shape[1]
                    k, v = key[: before + i + 1, shared], value[: before + i + 1, shared]
                    scores = k @ self.query[token, head] / self.query.shape[2] ** 0.5
                    output[token, head] = torch.softmax(scores, dim=0) @ v
                token += 1
        return output


def close(left, right, tolerance=1e-12):
    return (left - right).abs().max() <= tolerance  # False where either is NaN


def test_auto_is_gather_and_says_so():
    assert make_backend("auto").name == "gather"


def test_an_unknown_backend_is_refused_with_the_names_that_exist():
    with pytest.raises(
        InvalidParameter, match="attention_backend = 'flash': choose one of auto, reference, gather, compiled, triton"
    ):
        make_backend("flash")


@pytest.mark.parametrize("backend", ["reference", "gather"])
@pytest.mark.parametrize("num_heads, num_kv_heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize(
    "rows",
    [[(6, 0)], [(4, 5)], [(2, 11)], [(1, 0)], [(1, 12)], [(1, 3), (5, 2), (1, 40), (3, 0), (1, 7)]],
    ids=["prefill", "chunk-with-history", "short-chunk-long-history", "first-token", "decode", "mix"],
)
def test_a_backend_computes_the_plain_equation(backend, num_heads, num_kv_heads, rows):
    scene = Scene(rows, 4, num_heads, num_kv_heads)
    assert close(scene.run(backend), scene.plain())


def check_that_rows_are_apart(backend, block_size=4, head_dim=8, dtype=torch.float64, tolerance=1e-12):
    """Infinity times a weight of zero is NaN, and NaN is for ever: whoever reads one row's keys or values on another's
    behalf, shows it.
    """
    rows = [(1, 3), (5, 2), (1, 40), (3, 0), (1, 7)]
    row_of_token = torch.tensor([row for row, (fed, _) in enumerate(rows) for _ in range(fed)])
    for broken in range(len(rows)):
        for name, poison in (("key", "nan"), ("value", "inf")):
            scene = Scene(rows, block_size, head_dim=head_dim, dtype=dtype)
            expected, others = scene.plain(), row_of_token != broken
            for p in range(scene.batch.context_lens[broken]):
                block = scene.batch.block_tables[broken, p // block_size]
                getattr(scene.layer, name)[block, p % block_size] = float(poison)
            assert close(scene.run(backend)[others], expected[others], tolerance)


def check_that_long_sums_stay_in_float16(backend, head_dim=8):
    """The values of 2,000 tokens, each within the range of float16, add up to more than it holds; their mean does not.
    Queries of 0 see all tokens alike.
    """
    scene = Scene([(1, 1999), (4, 1996)], 16, head_dim=head_dim, dtype=torch.float16)
    scene.query.zero_()
    scene.layer.value.fill_(60.0)
    assert close(scene.run(backend), torch.full_like(scene.query, 60.0), 0.5)


@pytest.mark.parametrize("backend", ["reference", "gather"])
def test_a_long_context_in_float16_is_averaged_and_not_summed_first(backend):
    check_that_long_sums_stay_in_float16(backend)


@pytest.mark.parametrize("backend", ["reference", "gather"])
def test_what_one_row_holds_reaches_no_other_row(backend):
    check_that_rows_are_apart(backend)


ROWS = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 3, 7]), st.integers(0, 50)), min_size=1, max_size=6)


@given(
    ROWS,
    st.integers(1, 32),
    st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    st.sampled_from([20, 100, 8192]),
    st.integers(0, 99),
)
@example([(1, 79), (1, 0), (1, 40)], 16, (4, 2), 8192, 0)
def test_gather_equals_reference_on_any_ragged_batch(rows, block_size, heads, max_group_slots, seed):
    scene = Scene(rows, block_size, *heads, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "MAX_GROUP_SLOTS", max_group_slots)
        gathered = scene.run("gather")
    assert close(gathered, scene.run("reference"))


def test_one_gather_backend_serves_steps_of_growing_and_shrinking_size():
    backend = make_backend("gather")
    for rows in ([(1, 3)], [(9, 30), (1, 50), (1, 49)], [(1, 1), (1, 2)]):
        scene = Scene(rows, 4)
        assert close(backend.forward(scene.query, scene.layer, scene.prepared(backend)), scene.plain())


def test_padding_has_no_weight_even_where_its_score_is_the_largest_by_far():
    scene = Scene([(1, 30), (1, 3), (5, 9)], 4)
    scene.query *= 200
    scene.layer.key.mul_(200)
    assert close(scene.run("gather"), scene.run("reference"), 1e-9)


def test_the_buffers_of_gather_outlast_many_steps_of_a_growing_context():
    backend, buffers = make_backend("gather"), set()
    for before in range(64, 128):
        scene = Scene([(1, before)], 4)
        backend.forward(scene.query, scene.layer, scene.prepared(backend))
        buffers.add(backend._buffers[0].data_ptr())
    assert len(buffers) <= 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gather_equals_reference_to_the_precision_of_the_dtype(dtype):
    scene = Scene([(1, 30), (5, 9), (1, 3), (4, 0)], 4, dtype=dtype)
    gathered = scene.run("gather")
    assert gathered.dtype == dtype
    assert close(gathered, scene.run("reference"), 4 * torch.finfo(dtype).eps)


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=40))
def test_groups_hold_every_row_once_and_little_padding(context_lens):
    groups = group_by_length(range(len(context_lens)), context_lens)
    assert sorted(row for group in groups for row in group) == list(range(len(context_lens)))
    for group in groups:
        longest = context_lens[group[0]]
        assert all(0 <= longest - context_lens[row] <= max(longest // 4, 32) for row in group)
        assert len(group) == 1 or len(group) * longest <= gather.MAX_GROUP_SLOTS
