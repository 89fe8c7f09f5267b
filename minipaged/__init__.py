"""minipaged: PagedAttention, the serving system of the vLLM paper, in plain PyTorch.

    from minipaged import LLM, SamplingParams

The names below are imported when they are first used, so that `import minipaged.blocks` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minipaged.beam_search_params import BeamSearchParams
    from minipaged.engine.llm import LLM
    from minipaged.engine.llm_engine import LLMEngine
    from minipaged.engine.prompts import TextPrompt, TokensPrompt
    from minipaged.engine_args import EngineArgs
    from minipaged.outputs import CompletionOutput, RequestOutput
    from minipaged.sampling_params import SamplingParams

_HOMES = {
    "LLM": "minipaged.engine.llm",
    "LLMEngine": "minipaged.engine.llm_engine",
    "EngineArgs": "minipaged.engine_args",
    "SamplingParams": "minipaged.sampling_params",
    "BeamSearchParams": "minipaged.beam_search_params",
    "RequestOutput": "minipaged.outputs",
    "CompletionOutput": "minipaged.outputs",
    "TextPrompt": "minipaged.engine.prompts",
    "TokensPrompt": "minipaged.engine.prompts",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minipaged' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
