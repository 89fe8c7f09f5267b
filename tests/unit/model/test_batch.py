"""The ragged batch: rows of a plan laid side by side, each token with the slot that its block table gives it."""

from hypothesis import given
from hypothesis import strategies as st

from minipaged.model.batch import RaggedBatch
from minipaged.step import SequenceWork


def row(token_ids, start, block_table):
    return SequenceWork(0, tuple(token_ids), start, tuple(block_table), table_version=0)


def test_a_token_goes_to_the_slot_that_its_block_table_gives_its_position():
    batch = RaggedBatch.build([row([7, 8, 9], 3, [5, 2])], block_size=4, device="cpu")
    assert batch.token_ids.tolist() == [7, 8, 9]
    assert batch.positions.tolist() == [3, 4, 5]
    assert batch.slots.tolist() == [5 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1]


def test_the_context_of_a_row_includes_its_new_tokens():
    batch = RaggedBatch.build([row([1, 2], 0, [0]), row([3], 6, [3, 1])], block_size=4, device="cpu")
    assert batch.query_lens == (2, 1)
    assert batch.context_lens == (2, 7)


def test_a_short_block_table_is_padded_with_its_own_first_block():
    batch = RaggedBatch.build([row([1], 0, [6]), row([3], 9, [3, 1, 4])], block_size=4, device="cpu")
    assert batch.block_tables.tolist() == [[6, 6, 6], [3, 1, 4]]


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_the_layout_equals_one_computed_token_by_token(block_size, lengths, rng):
    rows = []
    for query_len, start in lengths:
        num_blocks = -(-(start + query_len) // block_size)
        rows.append(row(rng.choices(range(100), k=query_len), start, rng.sample(range(100), num_blocks)))
    batch = RaggedBatch.build(rows, block_size, "cpu")

    expected = []
    for work in rows:
        for i, token_id in enumerate(work.token_ids):
            position = work.start + i
            slot = work.block_table[position // block_size] * block_size + position % block_size
            expected.append((token_id, position, slot))
    assert list(zip(batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), strict=True)) == expected
