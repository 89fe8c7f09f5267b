"""Kernels of our own, in Triton: a decode reads each key and value once, where it lies, and no layer copies any.

    new keys, values ──▶ write (triton_write.py) ──▶ the layer's pool
    rows that feed one token ──▶ decode (triton_decode.py)    ─┐
    rows that feed more      ──▶ prefill (triton_prefill.py)  ─┴─▶ output        both walk by triton_attend.py

Triton compiles them for a GPU. On a CPU they can only be interpreted, which is slow and good for testing: with
TRITON_INTERPRET=1 in the environment, NumPy does what each program would. **They have only ever run so**: on a GPU this
is untested, and no time was measured.

Triton is an optional dependency, so it is imported when the backend is built, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from minipaged.config import ModelConfig
from minipaged.errors import InvalidParameter
from minipaged.model.attention.backend import AttentionBackend
from minipaged.model.batch import RaggedBatch
from minipaged.model.kv_layer import KVLayer

if TYPE_CHECKING:
    from minipaged.model.attention.triton_decode import DecodeParts
    from minipaged.model.attention.triton_prefill import PrefillSpans

BLOCK_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    block_tables: torch.Tensor  # [S, longest table]
    decodes: DecodeParts
    prefills: PrefillSpans


class TritonAttention(AttentionBackend):
    """Paged decode, paged prefill and KV write, each a kernel. It needs CUDA, or Triton's interpreter."""

    name = "triton"

    def __init__(self) -> None:
        try:
            import triton  # noqa: F401
        except ImportError as error:
            raise InvalidParameter(
                "attention_backend", self.name, "needs triton: pip install minipaged[triton]"
            ) from error
        from minipaged.model.attention import triton_attend, triton_decode, triton_prefill, triton_write

        self.is_interpreted = triton_attend.IS_INTERPRETED
        self._decode, self._prefill, self._write = triton_decode, triton_prefill, triton_write

    def check_can_run(
        self, config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """See `AttentionBackend.check_can_run`."""
        if torch.device(device).type != "cuda" and not self.is_interpreted:
            raise InvalidParameter(
                "device",
                str(device),
                "attention_backend='triton' needs cuda, or Triton's interpreter (slow; "
                "TRITON_INTERPRET=1 in the environment before Python starts)",
            )
        for field, value, allowed in (
            ("block_size", block_size, BLOCK_SIZES),
            ("head_dim", config.head_dim, HEAD_DIMS),
            ("dtype", dtype, DTYPES),
        ):
            if value not in allowed:
                words = [str(choice).removeprefix("torch.") for choice in (value, *allowed)]
                shown = words[0] if field == "dtype" else value
                raise InvalidParameter(field, shown, f"attention_backend='triton' takes {', '.join(words[1:])}")

    def prepare(self, batch: RaggedBatch, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> TritonMetadata:
        """Say which program will do what."""
        return TritonMetadata(
            batch.block_tables, self._decode.DecodeParts.of(batch), self._prefill.PrefillSpans.of(batch)
        )

    def write(self, layer: KVLayer, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """See `AttentionBackend.write`. Keys and values in one launch."""
        with torch.cuda.device_of(key):  # Triton launches on the current device, whatever its arguments are on
            self._write.write(layer, key.contiguous(), value.contiguous(), slots)

    def forward(self, query: torch.Tensor, layer: KVLayer, metadata: TritonMetadata) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        query = query.contiguous()
        output = torch.empty_like(query)  # [T, H, D]
        with torch.cuda.device_of(query):
            if len(metadata.decodes.parts):
                self._decode.decode(output, query, layer, metadata.block_tables, metadata.decodes)
            if len(metadata.prefills.spans):
                self._prefill.prefill(output, query, layer, metadata.block_tables, metadata.prefills)
        return output
