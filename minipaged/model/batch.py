"""A step's work as tensors: the tokens of all sequences side by side, without padding.

    row 0: a prefill chunk     row 1: a decode    row 2: a decode
    token_ids    a  b  c  d          x                  y            [T], T = 6
    positions    8  9 10 11         30                  5
    query_lens   4                   1                  1            how many tokens a row feeds
    context_lens 12                 31                  6            how many it attends to: the fed ones and all before

To every part of the model but attention, the rows are one long list of tokens. Attention also needs to know where each
row's keys and values are: its block table (paper, section 4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from minipaged.step import SequenceWork


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """One step's rows. S rows feed T tokens; all tensors are int64 on the model's device."""

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T] each token's place in its own sequence
    slots: torch.Tensor  # [T] where each token's KV goes in the flattened pool
    query_lens: tuple[int, ...]  # S numbers that sum to T
    context_lens: tuple[int, ...]  # S numbers; each includes the row's new tokens
    block_tables: torch.Tensor  # [S, longest table], padded with the row's own first block
    block_size: int

    @classmethod
    def build(cls, rows: Sequence[SequenceWork], block_size: int, device: torch.device | str) -> RaggedBatch:
        """Lay out the rows of a plan. They stay in the plan's order."""
        query_lens = np.array([len(row.token_ids) for row in rows])
        starts = np.array([row.start for row in rows])
        num_tokens = int(query_lens.sum())
        token_ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, num_tokens)

        row_of_token = np.repeat(np.arange(len(rows)), query_lens)  # [T]
        first_token = np.cumsum(query_lens) - query_lens  # [S] where each row begins among the T tokens
        positions = np.arange(num_tokens) + (starts - first_token)[row_of_token]  # [T]
        tables = _padded_tables(rows)  # [S, W], W blocks in the longest
        slots = tables[row_of_token, positions // block_size] * block_size + positions % block_size  # [T]

        def to_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            token_ids=to_device(token_ids),
            positions=to_device(positions),
            slots=to_device(slots),
            query_lens=tuple(query_lens.tolist()),
            context_lens=tuple((starts + query_lens).tolist()),
            block_tables=to_device(tables),
            block_size=block_size,
        )


def _padded_tables(rows: Sequence[SequenceWork]) -> np.ndarray:
    """The block tables as one rectangle `[S, W]`. A row's padding is its own first block, never a stranger's."""
    tables = np.empty((len(rows), max(len(row.block_table) for row in rows)), dtype=np.int64)
    for padded, row in zip(tables, rows, strict=True):
        padded[: len(row.block_table)] = row.block_table
        padded[len(row.block_table) :] = row.block_table[0]
    return tables
