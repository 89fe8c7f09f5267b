"""The allocator's contract, with the values of vLLM's own tests where they apply."""

import pytest

from minipaged.blocks.allocator import BlockAllocator
from minipaged.errors import DoubleFree, InvalidParameter, InvariantBroken, OutOfBlocks


def test_free_count_falls_to_zero_and_the_next_allocation_raises():
    allocator = BlockAllocator(4)
    for left in (3, 2, 1, 0):
        allocator.allocate()
        assert allocator.num_free == left
    with pytest.raises(OutOfBlocks, match="1 blocks asked for, 0 of the 4 device blocks are free"):
        allocator.allocate()


def test_freeing_a_free_block_raises_and_changes_nothing():
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(4)
    for count, block in enumerate(blocks, start=1):
        assert allocator.free(block)
        assert allocator.num_free == count
        with pytest.raises(DoubleFree):
            allocator.free(block)
        assert allocator.num_free == count
    allocator.check([])


def test_an_allocation_of_several_blocks_is_all_or_nothing():
    allocator = BlockAllocator(3)
    held = allocator.allocate(2)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(2)
    allocator.check(held)
    assert allocator.num_free == 1


def test_a_shared_block_is_free_when_its_last_reference_goes():
    allocator = BlockAllocator(1)
    [block] = allocator.allocate()
    allocator.share(block)
    assert allocator.ref_count(block) == 2
    assert not allocator.free(block)
    assert allocator.num_free == 0
    assert allocator.free(block)
    assert allocator.num_free == 1


def test_a_free_block_cannot_be_shared():
    with pytest.raises(DoubleFree):
        BlockAllocator(1).share(0)


def test_the_same_operations_give_the_same_blocks_whatever_the_order_of_the_free_list():
    order = [5, 2, 7, 0, 1, 3, 4, 6]
    runs = []
    for _ in range(2):
        allocator = BlockAllocator(8, free_order=order)
        first = allocator.allocate(3)
        allocator.free(first[1])
        runs.append((first, allocator.allocate(6)))
    assert runs[0] == runs[1]
    assert runs[0][0] == [5, 2, 7]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3]])
def test_a_free_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(InvalidParameter, match="free_order"):
        BlockAllocator(3, free_order=order)


def test_check_names_the_equation_that_broke():
    allocator = BlockAllocator(2)
    [block] = allocator.allocate()
    with pytest.raises(InvariantBroken, match=r"reference count 1 != 2 entries"):
        allocator.check([block, block])
    allocator._free.append(block)
    with pytest.raises(InvariantBroken, match=r"free 2 \+ cached 0 \+ referenced 1 != all 2"):
        allocator.check([block])
    allocator._free.append(block)
    with pytest.raises(InvariantBroken, match=r"3 entries on the free list != 2 distinct"):
        allocator.check([block])
