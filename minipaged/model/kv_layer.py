"""One layer's KV cache: two tensors cut into blocks, and the one way to write into them.

    block 0          block 1          block 2
    [t0 t1 t2 t3]    [free       ]    [t4 t5 -- --]        block_size 4; this sequence's block table is (0, 2)
     0  1  2  3       4  5  6  7       8  9 10 11          slot = table[position // block_size] * block_size
                                                                  + position % block_size

A block is a run of slots; a slot holds the key and the value of one token, for all KV heads. Flattened over blocks, the
tensor has one row a slot, so writing is one scatter of rows, wherever the block tables placed them. What an unused slot
holds is nobody's business: it may be NaN, and no reader may let it matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class KVLayer(NamedTuple):
    """The keys and values of one decoder layer, both `[num_blocks, block_size, num_kv_heads, head_dim]`."""

    key: torch.Tensor
    value: torch.Tensor

    def write(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Store the new tokens' keys and values `[T, num_kv_heads, head_dim]` at `slots` `[T]`."""
        self.key.flatten(0, 1).index_copy_(0, slots, key)
        self.value.flatten(0, 1).index_copy_(0, slots, value)
