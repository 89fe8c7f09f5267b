"""GGUF metadata → tokenizer.json, tokenizer_config.json and the chat template.

The metadata give the vocabulary and the merges, but name only by a word how text is cut up before the merges apply, and
a wrong cut gives wrong tokens for the same vocabulary, without any error. So the words that we know are listed here,
and every other is refused.

    tokenizer.ggml.model = gpt2     byte-level BPE; tokenizer.ggml.pre says how text is cut
    tokenizer.ggml.model = llama    SentencePiece BPE: text is not cut; scores give the order of the merges
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from minipaged.errors import BrokenCheckpoint, UnsupportedModel

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # of tokenizer.ggml.token_type

LLAMA3_CUT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # what English leaves after an apostrophe
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with what stands before it
        r"\p{N}{1,3}",  # up to three digits
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation
        r"\s*[\r\n]+|\s+(?!\S)|\s+",  # line ends and other space
    )
)
CUTS = {  # tokenizer.ggml.pre → (what comes before the bytes, whether GPT-2's own cut follows)
    "gpt-2": (None, True),
    "smollm": (pre_tokenizers.Digits(individual_digits=True), True),
    "llama-bpe": (pre_tokenizers.Split(Regex(LLAMA3_CUT), "isolated"), False),
}


def write_tokenizer(metadata: Mapping[str, Any], target: Path) -> None:
    """Writes what `AutoTokenizer.from_pretrained(target)` reads. Raises UnsupportedModel and BrokenCheckpoint."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel("tokenizer.ggml.model", kind, "supported are gpt2 and llama (SentencePiece)")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise BrokenCheckpoint("tokenizer.ggml.tokens", tokens, "must be the list of tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise BrokenCheckpoint("tokenizer.ggml.token_type", len(types), f"must be as many as the tokens, {len(tokens)}")
    special_tokens = _special_tokens(metadata, tokens)
    backend = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens, types)
    added = [
        AddedToken(token, normalized=False, special=token_type == CONTROL)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in (CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)

    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=metadata["llama.context_length"],
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        add_bos_token=_adds_bos(metadata, kind),
        add_eos_token=metadata.get("tokenizer.ggml.add_eos_token", False),
        chat_template=metadata.get("tokenizer.chat_template"),
        **special_tokens,
    ).save_pretrained(target)


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in CUTS:
        raise UnsupportedModel("tokenizer.ggml.pre", pre, f"supported are {', '.join(CUTS)}")
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        # Llama 3 looks a whole word up before it merges: some of its words no merge leads to.
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises nothing narrower: a merge of tokens that are not there
        raise BrokenCheckpoint("tokenizer.ggml.merges", len(merges), f"do not fit the tokens ({error})") from error
    backend = Tokenizer(model)
    before, gpt2_cut = CUTS[pre]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2_cut)
    backend.pre_tokenizer = pre_tokenizers.Sequence([before, to_bytes]) if before else to_bytes
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """As in SentencePiece: spaces become ▁, each stretch of text gets one in front, unknown characters become bytes."""
    scores = metadata.get("tokenizer.ggml.scores") or ()
    if len(scores) != len(tokens):
        raise BrokenCheckpoint("tokenizer.ggml.scores", len(scores), f"must be as many as the tokens, {len(tokens)}")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pieces = {token for token, token_type in zip(tokens, types, strict=True) if token_type in (NORMAL, USER_DEFINED)}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_by_score(vocab, pieces, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_underline, to_space = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    decoding = [to_space, decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_underline])
        decoding.append(decoders.Strip(" ", left=1, right=0))
    else:
        backend.normalizer = to_underline
    backend.decoder = decoders.Sequence(decoding)
    return backend


def _merges_by_score(vocab: Mapping[str, int], pieces: set[str], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union scores best: so every way to make a piece is a merge."""
    best_first = sorted(pieces, key=lambda piece: (-scores[vocab[piece]], vocab[piece]))
    return [
        (piece[:cut], piece[cut:])
        for piece in best_first
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _adds_bos(metadata: Mapping[str, Any], kind: str) -> bool:
    """Where the file does not say, what llama.cpp does."""
    by_default = kind == "llama" or metadata["tokenizer.ggml.pre"] == "llama-bpe"
    return metadata.get("tokenizer.ggml.add_bos_token", by_default)


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    named = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise BrokenCheckpoint(f"tokenizer.ggml.{key}_token_id", token_id, f"must be below {len(tokens)}")
        named[f"{name}_token"] = tokens[token_id]
    return named
