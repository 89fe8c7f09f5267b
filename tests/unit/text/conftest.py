"""Small tokenizers of each kind, built in milliseconds, and the default model's own."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from minipaged.text.tokenizer import Tokenizer, load_tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def add_specials(backend: Backend) -> Backend:
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL.values()])
    return backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """One token for each byte, its id the byte's value: every character beyond ASCII is split."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # printable bytes stand for themselves, the rest in order
    others = (letter for letter in letters if ord(letter) > 255)
    vocab = {chr(byte) if chr(byte) in letters else next(others): byte for byte in range(256)}
    backend = Backend(models.BPE(vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(add_specials(backend), SPECIAL)


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """As Llama 2's: words begin with a visible space, which is stripped at the start of a text; bytes for the rest."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "lo", "a", "b", "c"]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(add_specials(backend), SPECIAL)


@pytest.fixture(scope="session")
def spaced() -> Tokenizer:
    """Without a decoder, the library writes a space between any two tokens."""
    backend = Backend(models.WordLevel({"<unk>": 0, "red": 1, "green": 2, "blue": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(add_specials(backend), SPECIAL)


@pytest.fixture(scope="session")
def model_directory():
    from minipaged.loading import find_model

    return find_model()


@pytest.fixture(scope="session")
def real_tokenizer(model_directory) -> Tokenizer:
    return load_tokenizer(model_directory)
