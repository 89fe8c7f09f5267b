"""The tokenizer of a GGUF file cuts text as the model was trained, or is refused."""

from __future__ import annotations

import hashlib

import pytest
from transformers import AutoTokenizer

from minipaged.errors import BrokenCheckpoint, UnsupportedModel
from minipaged.loading import find_model
from minipaged.loading.gguf_tokenizer import write_tokenizer
from tests.unit.loading.tiny_checkpoints import gguf_metadata, tiny_llama

# A SentencePiece vocabulary: three reserved tokens, the bytes, one user-defined token, pieces with their scores.
PIECES = {
    "▁": -9,
    "a": -1,
    "b": -2,
    "c": -3,
    "ab": -4,
    "bc": -3.5,
    "abc": -5,
    "▁a": -6,
    "▁ab": -7,
    "▁▁": -8,
    "ca": -2.5,
}
RESERVED = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<tool>"]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": [*RESERVED, *PIECES],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 4, *[1] * len(PIECES)],
    "tokenizer.ggml.scores": [0.0] * len(RESERVED) + [float(score) for score in PIECES.values()],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}

# The text by whose tokens llama.cpp's converter recognises a tokenizer, and the hash that it knows as "smollm".
CHECK_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated) ✅ 🦙🦙 "
    "3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ "
    "------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? "
    "'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
CHECK_HASH = "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249"


def tokenizer(tmp_path, **changes):
    metadata = {**gguf_metadata(tiny_llama()), **changes}
    write_tokenizer(metadata, tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def pieces(tok, text):
    return tok.convert_ids_to_tokens(tok.encode(text))


@pytest.mark.real_model
def test_the_default_model_tokenises_as_its_publisher_does():
    tok = AutoTokenizer.from_pretrained(find_model())
    assert hashlib.sha256(str(tok.encode(CHECK_TEXT)).encode()).hexdigest() == CHECK_HASH
    assert tok.decode(tok.encode(CHECK_TEXT)) == CHECK_TEXT
    assert (tok.bos_token, tok.eos_token, tok.eos_token_id) == ("<|im_start|>", "<|im_end|>", 2)
    turn = tok.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
    assert turn.startswith("<|im_start|>system\n")
    assert turn.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_smollm_cuts_digits_before_anything_else(tmp_path):
    tok = tokenizer(tmp_path)
    assert pieces(tok, "hello hello12") == ["hello", "Ġhello", "1", "2"]
    assert pieces(tok, "  1\n\n2") == ["ĠĠ", "1", "ĊĊ", "2"]


def test_llama_bpe_keeps_up_to_three_digits_and_begins_with_a_bos(tmp_path):
    tok = tokenizer(tmp_path, **{"tokenizer.ggml.pre": "llama-bpe"})
    assert pieces(tok, "hello12 12") == ["<|im_start|>", "hello", "12", "Ġ", "12"]


def test_gpt_2_keeps_numbers_with_their_space(tmp_path):
    tok = tokenizer(tmp_path, **{"tokenizer.ggml.pre": "gpt-2"})
    assert pieces(tok, "  1 12") == ["Ġ", "Ġ", "1", "Ġ", "12"]


def test_llama_bpe_takes_a_word_that_no_merge_leads_to(tmp_path):
    metadata = gguf_metadata(tiny_llama())
    changes = {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "xyz"],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 1],
        "tokenizer.ggml.pre": "llama-bpe",
    }
    assert pieces(tokenizer(tmp_path, **changes), "xyz")[1:] == ["xyz"]


def test_control_tokens_stay_whole_and_are_skipped_when_decoding(tmp_path):
    tok = tokenizer(tmp_path)
    ids = tok.encode("<|im_start|>hello<|im_end|><|endoftext|>")
    assert len(ids) == 4
    assert (ids[0], ids[2:]) == (1, [2, 0])
    assert tok.decode(ids, skip_special_tokens=True) == "hello"
    assert tok.apply_chat_template([{"content": "hello"}], tokenize=False) == "<|im_start|>hello<|im_end|>"
    assert tok.model_input_names == ["input_ids", "attention_mask"]


@pytest.mark.parametrize("key", ["tokenizer.ggml.model", "tokenizer.ggml.pre"])
@pytest.mark.parametrize("value", ["something new", None])
def test_an_unknown_cut_is_refused_by_name(tmp_path, key, value):
    with pytest.raises(UnsupportedModel, match=f"{key} = {value!r}"):
        tokenizer(tmp_path, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.tokens", []),
        ("tokenizer.ggml.token_type", [1]),
        ("tokenizer.ggml.merges", ["h e", "no such"]),
        ("tokenizer.ggml.eos_token_id", 10_000),
    ],
)
def test_metadata_that_contradict_each_other_are_a_broken_checkpoint(tmp_path, key, value):
    with pytest.raises(BrokenCheckpoint, match=key):
        tokenizer(tmp_path, **{key: value})


def sentencepiece_by_hand(text):
    """SentencePiece's own rule: join the neighbours whose union scores best, the leftmost first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(-PIECES[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in PIECES]
        if not joins:
            break
        _, i = min(joins)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    in_bytes = [[part] if part in PIECES else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [piece for part in in_bytes for piece in part]


@pytest.mark.parametrize("text", ["abc", " abc", "  ab  cab", "abcabcab aab bbca", "aé😁b", "a\n\nb", "cacab abab   "])
def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(tmp_path, text):
    tok = tokenizer(tmp_path, **SENTENCEPIECE)
    assert pieces(tok, text) == ["<s>", *sentencepiece_by_hand(text)]
    assert tok.decode(tok.encode(text), skip_special_tokens=True) == text


def test_sentencepiece_keeps_user_defined_tokens_and_can_do_without_the_space_in_front(tmp_path):
    changes = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tok = tokenizer(tmp_path, **SENTENCEPIECE, **changes)
    assert pieces(tok, "ab<tool>ab") == ["ab", "<tool>", "ab"]
    assert tok.decode(tok.encode(" ab")) == " ab"


def test_sentencepiece_without_scores_is_a_broken_checkpoint(tmp_path):
    with pytest.raises(BrokenCheckpoint, match="tokenizer.ggml.scores"):
        tokenizer(tmp_path, **{**SENTENCEPIECE, "tokenizer.ggml.scores": None})
