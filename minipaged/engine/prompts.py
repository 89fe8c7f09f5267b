"""What a user may pass as a prompt, checked and turned into token ids before anything is scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypedDict

from minipaged.blocks.block_table import blocks_for
from minipaged.errors import InvalidParameter, InvalidPrompt
from minipaged.sampling_params import SamplingParams
from minipaged.text.tokenizer import Tokenizer


class _PromptOptions(TypedDict, total=False):
    cache_salt: str  # cached prefixes are shared only with requests of the same salt


class TextPrompt(_PromptOptions):
    prompt: str


class TokensPrompt(_PromptOptions):
    prompt_token_ids: Sequence[int]


Prompt = str | TextPrompt | TokensPrompt

_ALLOWED = 'a string, {"prompt": string} or {"prompt_token_ids": list of token ids}, with a "cache_salt" or without'


class RequestLimits(NamedTuple):
    """What a request must keep within."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    block_size: int


class ParsedPrompt(NamedTuple):
    text: str | None  # None where the user gave token ids
    token_ids: tuple[int, ...]
    cache_salt: str = ""


def parse_prompt(prompt: Any, tokenizer: Tokenizer | None, limits: RequestLimits) -> ParsedPrompt:
    """The prompt as token ids. Raises InvalidPrompt: of no known form, empty, too long, or with a foreign id."""
    text, token_ids, cache_salt = _read(prompt, tokenizer)
    if not token_ids:
        raise InvalidPrompt("prompt", prompt, "must have at least one token")
    for token_id in token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidPrompt("prompt_token_ids", token_id, f"must be from 0 to {limits.vocab_size - 1}")
    if len(token_ids) >= limits.max_model_len:
        raise InvalidPrompt(
            "prompt",
            prompt,
            f"has {len(token_ids)} tokens; at most {limits.max_model_len - 1} leave room for an answer "
            f"(max_model_len is {limits.max_model_len})",
        )
    needed = blocks_for(len(token_ids), limits.block_size)
    if needed > limits.num_blocks:
        raise InvalidPrompt(
            "prompt",
            prompt,
            f"needs {needed} KV blocks of {limits.block_size} tokens; the pool has {limits.num_blocks}",
        )
    return ParsedPrompt(text, token_ids, cache_salt)


def as_prompt_list(prompts: Any) -> list[Any]:
    """One prompt or a list of them, as a list. A list of integers is taken for what it is: a mistake, named."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidPrompt("prompts", prompts, f"must be {_ALLOWED}, or a list of such")
    return list(prompts)


def _read(prompt: Any, tokenizer: Tokenizer | None) -> ParsedPrompt:
    cache_salt = ""
    if isinstance(prompt, dict):
        if len(prompt.keys() & {"prompt", "prompt_token_ids"}) != 1 or len(prompt.keys() - {"cache_salt"}) != 1:
            raise InvalidPrompt("prompt", prompt, f"must be {_ALLOWED}")
        cache_salt = prompt.get("cache_salt", "")
        if not isinstance(cache_salt, str) or any("\ud800" <= char <= "\udfff" for char in cache_salt):
            raise InvalidPrompt("cache_salt", cache_salt, "must be a string of valid Unicode")
        if "prompt_token_ids" in prompt:
            return ParsedPrompt(None, _read_token_ids(prompt["prompt_token_ids"]), cache_salt)
        prompt = prompt["prompt"]
    if not isinstance(prompt, str):
        raise InvalidPrompt("prompt", prompt, f"must be {_ALLOWED}")
    if tokenizer is None:
        raise InvalidPrompt("prompt", prompt, "must be token ids: the engine has no tokenizer (skip_tokenizer_init)")
    return ParsedPrompt(prompt, tuple(tokenizer.encode(prompt)), cache_salt)


def _read_token_ids(token_ids: Any) -> tuple[int, ...]:
    listed = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids  # arrays and tensors of one dimension
    if not isinstance(listed, (list, tuple)) or not all(
        isinstance(token_id, Integral) and not isinstance(token_id, bool) for token_id in listed
    ):
        raise InvalidPrompt("prompt_token_ids", token_ids, "must be a list of integers")
    return tuple(int(token_id) for token_id in listed)


def params_for_each(params: Any, count: int) -> list[Any]:
    """One set of parameters for all prompts, or as many as there are."""
    if params is None:
        params = SamplingParams()
    if not isinstance(params, (list, tuple)):
        return [params] * count
    if len(params) != count:
        raise InvalidParameter("sampling_params", params, f"must be one, or as many as there are prompts ({count})")
    return list(params)
