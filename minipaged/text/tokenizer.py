"""Text to token ids and back: the `tokenizers` library does the work, this class names what the engine needs of it.

A tokenizer comes from one of three places, and is the same three things afterwards: the library's tokenizer, the names
of its special tokens, and the source of its chat template.

    directory that transformers 5 saved ──────────────────────────▶ read here: tokenizer.json says it all
    any other directory (sentencepiece, old configs)  ─▶ AutoTokenizer ─┐
    a transformers tokenizer object (LLM(tokenizer=...)) ───────────────┴─▶ its backend_tokenizer

The short way is there because importing transformers' tokenizers takes longer than everything else that a chat does at
its start, apart from importing torch. It is taken only where it gives what AutoTokenizer gives, and tested to do so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from minipaged.errors import BrokenCheckpoint, InvalidPrompt, ModelNotFound, UnsupportedModel


class Tokenizer:
    """A tokenizer with its chat template. `special_tokens` maps names as "eos_token" to the token's text."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None = None
    ) -> None:
        # A tokenizer.json may carry the cutting and filling that its model was trained with; a prompt wants neither.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.all_special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def eos_token_id(self) -> int | None:
        eos_token = self.special_tokens.get("eos_token")
        return None if eos_token is None else self._backend.token_to_id(eos_token)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, the added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def __contains__(self, token_id: int) -> bool:
        """Whether the id is a token. A model's vocabulary may be larger: padded to a round number."""
        return self._backend.id_to_token(token_id) is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with `add_special_tokens` also what the tokenizer puts around it (a begin-of-text).

        Raises InvalidPrompt where the text is no valid Unicode (half of a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidPrompt("prompt", text, f"must be valid Unicode text ({error.reason})") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of token ids. Ids that are no token show nothing.

        Some decoders write a space between any two tokens; `spaces_between_special_tokens=False` leaves it out between
        two neighbouring special ones.
        """
        if skip_special_tokens or spaces_between_special_tokens:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        parts: list[list[int]] = [[]]
        for token_id in filter(self.__contains__, token_ids):
            if parts[-1] and parts[-1][-1] in self.all_special_ids and token_id in self.all_special_ids:
                parts.append([])
            parts[-1].append(token_id)
        return "".join(self._backend.decode(part, skip_special_tokens=False) for part in parts)

    def token_text(self, token_id: int) -> str:
        """One token by itself, a special one too: what `Logprob.decoded_token` shows."""
        return self._backend.decode([token_id], skip_special_tokens=False)


def load_tokenizer(source: Any) -> Tokenizer:
    """The tokenizer of a Hugging Face directory (a path), or of a transformers tokenizer object.

    Raises ModelNotFound, BrokenCheckpoint or UnsupportedModel.
    """
    if not isinstance(source, (str, Path)):
        return _from_transformers(source)
    directory = Path(source)
    if not directory.is_dir():
        raise ModelNotFound("tokenizer", str(source), "must be a directory with tokenizer.json")
    return _read_plain(directory) or _from_auto_tokenizer(directory)


def _from_transformers(tokenizer: Any) -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModel("tokenizer", tokenizer, "must be a path, or a transformers tokenizer that is fast")
    chat_template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    return Tokenizer(backend, tokenizer.special_tokens_map, chat_template)


def _from_auto_tokenizer(directory: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # late, because slow

    try:
        return _from_transformers(AutoTokenizer.from_pretrained(directory, local_files_only=True))
    except UnsupportedModel:
        raise
    except Exception as error:  # transformers and tokenizers raise whatever went wrong inside them
        raise BrokenCheckpoint("tokenizer", str(directory), f"holds no tokenizer that can be read ({error})") from error


# The names of transformers' class that adds nothing to tokenizer.json, and all that the config of such a tokenizer may
# say for the short way: what special tokens are called, and what does not concern encoding and decoding.
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
HARMLESS_KEYS = {"tokenizer_class", "backend", "model_max_length", "chat_template", "is_local", "local_files_only"}
HARMLESS_KEYS |= {"clean_up_tokenization_spaces", "model_input_names", "padding_side", "truncation_side"}
OLD_FILES = ("special_tokens_map.json", "added_tokens.json")  # these overrule the config


def _read_plain(directory: Path) -> Tokenizer | None:
    """The tokenizer of a directory where tokenizer.json says it all; None where only AutoTokenizer knows."""
    files = [directory / name for name in ("tokenizer.json", "tokenizer_config.json")]
    if not all(file.is_file() for file in files) or any((directory / name).exists() for name in OLD_FILES):
        return None
    try:
        config = json.loads(files[1].read_text(encoding="utf-8"))
        if config.get("tokenizer_class") not in PLAIN_CLASSES or config.keys() - {*SPECIAL_TOKENS, *HARMLESS_KEYS}:
            return None
        backend = tokenizers.Tokenizer.from_file(str(files[0]))
    except Exception as error:  # tokenizers raises plain Exception
        raise BrokenCheckpoint("tokenizer", str(directory), f"its tokenizer cannot be read ({error})") from error
    special_tokens = {name: config[name] for name in SPECIAL_TOKENS if config.get(name) is not None}
    chat_template = _read_chat_template(directory, config)
    known = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    if isinstance(chat_template, list) or not all(text in known for text in special_tokens.values()):
        return None
    return Tokenizer(backend, special_tokens, chat_template)


def _read_chat_template(directory: Path, config: Mapping[str, Any]) -> str | list | None:
    """The template's source; older configs may hold a list of several, by name."""
    file = directory / "chat_template.jinja"
    return file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
