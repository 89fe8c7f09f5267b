"""Triton's kernels, compiled for a card that need not be there. (As Triton 3.3 and later say it.)"""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from minipaged.model.attention import triton_decode, triton_prefill, triton_write

POINTERS = {
    "int64": ("tables", "parts", "merges", "spans", "slots"),
    "float32": ("numerators", "largests", "denominators"),
}
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def compile_kernels(
    dtype: torch.dtype, head_dim: int, block_size: int, group: int, capability: int
) -> dict[str, CompiledKernel]:
    """All of them by name, as their launchers would have them for such a model and pool."""
    launched = {
        "NUM_KV_HEADS": 8,
        "NUM_HEADS": 8 * group,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "TILE": triton_decode.tile_slots(block_size, head_dim, dtype.itemsize),
        "WIDEN": False,
        "PART": triton_decode.PART,
        "AT_ONCE": triton_decode.MERGED_AT_ONCE,
        "SIZE": 8 * head_dim,
        "PIECE": triton_write.PIECE,
    }
    return {
        kernel.__name__: _compile(kernel, {**launched, "NUM_QUERIES": num_queries}, dtype, capability)
        for kernel, num_queries in (
            (triton_decode.attend_parts, triton_decode.queries_of_a_program(group)),
            (triton_decode.merge_parts, None),
            (triton_prefill.attend_chunks, triton_prefill.queries_of_a_program(head_dim)),
            (triton_write.write_slots, None),
        )
    }


def _compile(kernel, launched: dict, dtype: torch.dtype, capability: int) -> CompiledKernel:
    names = list(enumerate(kernel.arg_names))
    signature = {name: "constexpr" if name in launched else _type(name, dtype) for _, name in names}
    constants = {(i,): launched[name] for i, name in names if name in launched}
    is_aligned = {(i,): [["tt.divisibility", 16]] for i, name in names if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, constants, is_aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_stages": 2})


def _type(name: str, dtype: torch.dtype) -> str:
    if name == "scale":
        return "fp32"
    if name in POINTERS["int64"]:
        return "*i64"
    return "*fp32" if name in POINTERS["float32"] else f"*{NAMES[dtype]}"
