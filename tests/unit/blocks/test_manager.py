"""Block tables over one pool: growing, forking, copy-on-write, freeing."""

import pytest

from minipaged.blocks.manager import BlockManager
from minipaged.errors import InvariantBroken, OutOfBlocks, UnknownSequence

FIGURE_6 = [7, 1, 3, 0, 2, 4, 5, 6]  # the order in which the paper's example hands out its blocks


def test_figure_6_of_the_paper_step_by_step():
    """ "Four score and seven years ago our", seven tokens, block size 4; then two decode steps."""
    blocks = BlockManager(8, block_size=4, free_order=FIGURE_6)
    blocks.grow(0, 7)
    assert blocks.table(0).entries() == ((7, 4), (1, 3))
    assert blocks.grow(0, 8) == []
    assert blocks.table(0).entries() == ((7, 4), (1, 4))
    blocks.grow(0, 9)
    assert blocks.table(0).entries() == ((7, 4), (1, 4), (3, 1))
    blocks.check()


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("length", [1, 7, 8, 16, 129])
@pytest.mark.parametrize("more", [1, 8, 129])
def test_growing_takes_exactly_the_blocks_that_the_length_asks_for(block_size, length, more):
    blocks = BlockManager(400, block_size)
    for target in (length, length + more):
        before = blocks.num_free
        needed = blocks.num_blocks_needed([(0, target)])
        blocks.grow(0, target)
        assert before - blocks.num_free == needed
        assert len(blocks.table(0)) == -(-target // block_size)
        blocks.check()
    blocks.free(0)
    assert blocks.num_free == 400


def test_growing_beyond_the_pool_raises_and_changes_nothing():
    blocks = BlockManager(2, block_size=4)
    blocks.grow(0, 5)
    with pytest.raises(OutOfBlocks):
        blocks.grow(0, 9)
    with pytest.raises(OutOfBlocks):
        blocks.grow(1, 1)
    assert blocks.table(0).entries() == ((0, 4), (1, 1))
    assert 1 not in blocks
    blocks.check()


def test_the_version_of_a_table_is_another_one_whenever_its_blocks_are_others():
    blocks = BlockManager(8, block_size=4)
    rows = {}
    for seq_id, length in [(0, 3), (0, 4), (0, 5), (1, 4), (0, 8), (0, 9)]:
        blocks.grow(seq_id, length)
        table = blocks.table(seq_id)
        rows.setdefault(table.version, set()).add((seq_id, table.physical_blocks))
    blocks.free(0)
    blocks.grow(0, 3)
    rows.setdefault(blocks.table(0).version, set()).add((0, blocks.table(0).physical_blocks))
    assert all(len(contents) == 1 for contents in rows.values())
    assert len(rows) == 5


def test_a_fork_shares_every_block_and_takes_none():
    blocks = BlockManager(8, block_size=4)
    blocks.grow(0, 7)
    free = blocks.num_free
    blocks.fork(0, 1)
    assert blocks.table(1).entries() == blocks.table(0).entries()
    assert blocks.num_free == free
    assert [blocks.allocator.ref_count(block) for block in blocks.table(0).physical_blocks] == [2, 2]
    blocks.check()


def test_figure_8_of_the_paper_step_by_step():
    """A1 writes first and copies block 1 to block 3; A2 is alone then, and writes in place."""
    blocks = BlockManager(8, block_size=4, free_order=FIGURE_6)
    blocks.grow("A1", 7)
    blocks.fork("A1", "A2")
    counts = blocks.allocator.ref_counts
    assert (counts[7], counts[1], blocks.num_free) == (2, 2, 6)
    assert blocks.grow("A1", 8) == [(1, 3)]
    assert blocks.table("A1").entries() == ((7, 4), (3, 4))
    assert blocks.table("A2").entries() == ((7, 4), (1, 3))
    counts = blocks.allocator.ref_counts
    assert (counts[7], counts[1], counts[3], blocks.num_free) == (2, 1, 1, 5)
    assert blocks.grow("A2", 8) == []
    assert blocks.table("A2").entries() == ((7, 4), (1, 4))
    blocks.free("A1")
    assert blocks.allocator.ref_counts == (0, 1, 0, 0, 0, 0, 0, 1)
    blocks.check()


@pytest.mark.parametrize("sharers", [2, 3, 5])
def test_k_sharers_of_a_partial_block_make_k_minus_one_copies(sharers):
    blocks = BlockManager(16, block_size=4)
    blocks.grow(0, 6)
    for child in range(1, sharers):
        blocks.fork(0, child)
    assert blocks.num_blocks_needed((seq, 7) for seq in range(sharers)) == sharers - 1
    old = blocks.table(0)[1]
    copies = [copy for seq in range(sharers) for copy in blocks.grow(seq, 7)]
    assert [source for source, _ in copies] == [old] * (sharers - 1)
    assert len({destination for _, destination in copies} | {old}) == sharers
    assert blocks.table(sharers - 1)[1] == old  # the last one is alone and writes in place
    blocks.check()


def test_a_full_shared_block_is_never_copied():
    blocks = BlockManager(8, block_size=4)
    blocks.grow(0, 8)
    blocks.fork(0, 1)
    assert blocks.grow(0, 9) + blocks.grow(1, 9) == []
    assert blocks.table(0).physical_blocks[:2] == blocks.table(1).physical_blocks[:2]
    blocks.check()


def test_freeing_one_of_two_sharers_leaves_the_other_as_it_was():
    blocks = BlockManager(8, block_size=4)
    blocks.grow(0, 6)
    blocks.fork(0, 1)
    blocks.grow(0, 7)
    table = blocks.table(1).entries()
    blocks.free(0)
    assert blocks.table(1).entries() == table
    blocks.check()
    blocks.free(1)
    assert blocks.num_free == 8


def test_a_sequence_without_a_table_is_named():
    blocks = BlockManager(1, block_size=1)
    with pytest.raises(UnknownSequence, match="sequence 3"):
        blocks.table(3)
    with pytest.raises(UnknownSequence, match="sequence 3"):
        blocks.fork(3, 4)


@pytest.mark.parametrize("broken", ["lost reference", "spare block", "block twice"])
def test_check_finds_what_is_broken(broken):
    blocks = BlockManager(8, block_size=4)
    blocks.grow(0, 8)
    if broken == "lost reference":
        blocks.allocator.free(blocks.table(0)[0])
    elif broken == "spare block":
        blocks.table(0).append(blocks.allocator.allocate())
    else:
        blocks.table(0).replace_last(blocks.table(0)[0])
    with pytest.raises(InvariantBroken):
        blocks.check()


def test_events_tell_what_happened_to_blocks_in_order():
    blocks = BlockManager(8, block_size=4)
    blocks.grow(0, 6)
    blocks.fork(0, 1)
    blocks.grow(1, 7)
    blocks.free(0)
    assert [tuple(event) for event in blocks.drain_events()] == [
        ("allocate", 0, (0, 1)),
        ("fork", 1, (0, 1)),
        ("copy", 1, (1, 2)),
        ("free", 0, (1,)),
    ]
    assert blocks.drain_events() == ()
