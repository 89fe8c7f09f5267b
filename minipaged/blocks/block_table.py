"""The block table of one sequence: which physical block each logical block is, and how far it is filled.

The paper's Figure 6, block size 4, a prompt of seven tokens in physical blocks 7 and 1:

    logical block      0      1                          position 2 lives in logical block 2 // 4 = 0, which is
    physical block     7      1                          physical block 7, at offset 2 % 4 = 2: slot 7 * 4 + 2 = 30
    filled             4      3                          of the pool

Blocks are filled from left to right, so only the last one can be partial, and one number says how far every block is
filled. That partial block is all the memory a sequence reserves and does not use: less than one block (section 4.3).
"""

from __future__ import annotations

from collections.abc import Iterator

from minipaged.blocks.prefix_cache import Entry
from minipaged.errors import InvariantBroken
from minipaged.snapshot import LogicalBlock


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold that many tokens."""
    return -(-num_tokens // block_size)


class BlockTable:
    """Logical to physical blocks. `versions` yields a new number for each new content, over all tables of a manager."""

    def __init__(self, block_size: int, versions: Iterator[int]) -> None:
        self.block_size = block_size
        self.num_filled = 0  # slots in use, counted from the first block's first slot
        self.version = next(versions)
        self.chain: list[Entry] = []  # with a prefix cache: the content of each full block, as far as it is known
        self._versions = versions
        self._physical: list[int] = []
        self._row: tuple[int, ...] | None = ()

    def __len__(self) -> int:
        return len(self._physical)

    def __getitem__(self, logical: int) -> int:
        return self._physical[logical]

    @property
    def physical_blocks(self) -> tuple[int, ...]:
        """The row that goes into the plan. Kept until it changes: most steps change nobody's row."""
        if self._row is None:
            self._row = tuple(self._physical)
        return self._row

    @property
    def last_block_is_partial(self) -> bool:
        return self.num_filled % self.block_size != 0

    def append(self, blocks: list[int]) -> None:
        """Put more physical blocks at the end."""
        self._physical += blocks
        self._changed()

    def replace_last(self, block: int) -> int:
        """Point the last logical block at another physical block; returns the one that it was."""
        old, self._physical[-1] = self._physical[-1], block
        self._changed()
        return old

    def fill(self, num_tokens: int) -> None:
        """From now on the first `num_tokens` slots are in use."""
        self.num_filled = num_tokens

    def fork(self, num_blocks: int | None = None) -> BlockTable:
        """The same blocks, filled as far, in a table of its own; or only the first `num_blocks`, which are full."""
        child = BlockTable(self.block_size, self._versions)
        child.append(self._physical[:num_blocks])
        child.chain = self.chain[:num_blocks]
        child.num_filled = self.num_filled if num_blocks is None else num_blocks * self.block_size
        return child

    @classmethod
    def of(
        cls, physical: list[int], num_filled: int, chain: list[Entry], block_size: int, versions: Iterator[int]
    ) -> BlockTable:
        """A table over blocks that are filled already; of the first ones the content may be known."""
        table = cls(block_size, versions)
        table.append(physical)
        table.chain = chain
        table.num_filled = num_filled
        return table

    def entries(self) -> tuple[LogicalBlock, ...]:
        """The table as the paper draws it: a physical block and its filled slots for each logical block."""
        full, rest = divmod(self.num_filled, self.block_size)
        return tuple(
            LogicalBlock(block, self.block_size if logical < full else rest)
            for logical, block in enumerate(self._physical)
        )

    def check(self) -> None:
        """No spare block, none missing, none twice."""
        expected = blocks_for(self.num_filled, self.block_size)
        if len(self._physical) != expected:
            raise InvariantBroken(
                f"{len(self._physical)} blocks in the table != ceil({self.num_filled} / {self.block_size}) = {expected}"
            )
        if len(set(self._physical)) != len(self._physical):
            raise InvariantBroken(f"a physical block stands twice in the table {self._physical}")

    def _changed(self) -> None:
        self._row = None
        self.version = next(self._versions)
