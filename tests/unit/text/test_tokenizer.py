import json
import subprocess
import sys

import pytest

from minipaged.errors import BrokenCheckpoint, InvalidPrompt, ModelNotFound, UnsupportedModel
from minipaged.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "Hello world!",
    "  two  spaces",
    "def f(x):\n\treturn 1234\n",
    "日本語 и русский 🙂👩‍👩‍👧",
    "",
    "<|im_end|> in text",
]


@pytest.fixture
def write(byte_level, tmp_path):
    """Writes a tokenizer's directory with the given tokenizer_config.json."""

    def write(config):
        byte_level._backend.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return write


PLAIN = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>"}


def test_text_comes_back_from_its_tokens(byte_level):
    for text in TEXTS:
        assert byte_level.decode(byte_level.encode(text)) == text


def test_special_tokens_are_one_token_and_shown_only_when_asked_for(byte_level):
    ids = byte_level.encode("a</s>")
    assert ids == [*byte_level.encode("a"), byte_level.eos_token_id]
    assert byte_level.decode(ids) == "a"
    assert byte_level.decode(ids, skip_special_tokens=False) == "a</s>"


def test_the_vocabulary_counts_added_tokens_and_knows_its_ids(byte_level):
    assert byte_level.vocab_size == 258
    assert byte_level.all_special_ids == {256, 257}
    assert 257 in byte_level and 258 not in byte_level
    assert byte_level.decode([300, *byte_level.encode("a")]) == "a"


def test_one_token_shows_its_own_text_a_special_one_too(byte_level, byte_fallback):
    assert byte_level.token_text(byte_level.eos_token_id) == "</s>"
    assert byte_level.token_text(byte_level.encode("é")[0]) == "\ufffd"
    assert byte_fallback.token_text(byte_fallback.encode("é")[-1]) == "\ufffd"


def test_neighbouring_special_tokens_are_joined_without_a_space_when_asked_for(spaced):
    ids = spaced.encode("red<s></s>green")
    assert spaced.decode(ids, skip_special_tokens=False) == "red <s> </s> green"
    assert spaced.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False) == "red <s></s> green"
    assert spaced.decode(ids, spaces_between_special_tokens=False) == "red green"


def test_half_of_a_surrogate_pair_is_refused(byte_level):
    with pytest.raises(InvalidPrompt, match="valid Unicode"):
        byte_level.encode("a\ud83d")


def test_truncation_and_padding_of_the_file_are_switched_off(write):
    path = write(PLAIN)
    file = path / "tokenizer.json"
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding": padding, "truncation": truncation}))
    assert len(load_tokenizer(path).encode("abcdef")) == 6


def test_a_chat_template_is_read_from_its_file_or_from_the_config(write):
    assert not load_tokenizer(write(PLAIN)).has_chat_template
    path = write(PLAIN | {"chat_template": "in the config"})
    assert load_tokenizer(path).chat_template == "in the config"
    (path / "chat_template.jinja").write_text("in the file")
    assert load_tokenizer(path).chat_template == "in the file"


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        PLAIN | {"add_bos_token": True},
        PLAIN | {"pad_token": "<pad>"},  # a special token that tokenizer.json does not have
        PLAIN | {"eos_token": {"__type": "AddedToken", "content": "</s>", "special": True}},
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>"},
        PLAIN | {"chat_template": [{"name": "default", "template": "the default"}, {"name": "rag", "template": "no"}]},
    ],
    ids=["plain", "add_bos", "new_special", "token_as_dict", "class_of_its_own", "named_templates"],
)
def test_every_kind_of_directory_gives_what_auto_tokenizer_gives(write, config):
    from transformers import AutoTokenizer

    path = write(config)
    theirs, ours = AutoTokenizer.from_pretrained(path), load_tokenizer(path)
    for text in [*TEXTS, "<s>a</s>"]:
        for add in (True, False):
            assert ours.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add)
        ids = theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_tokens == theirs.special_tokens_map
    assert (ours.eos_token_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
    assert ours.chat_template == (theirs.get_chat_template() if theirs.chat_template else None)


def test_a_transformers_tokenizer_is_taken_as_it_is(write):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(write(PLAIN))
    ours = load_tokenizer(theirs)
    assert isinstance(ours, Tokenizer)
    assert ours.encode("a</s>") == theirs.encode("a</s>")


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(ModelNotFound, match="no/such/place"):
        load_tokenizer("no/such/place")
    with pytest.raises(UnsupportedModel, match="tokenizer = 3"):
        load_tokenizer(3)
    with pytest.raises(BrokenCheckpoint, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_truncated_file_is_a_broken_checkpoint(write, name):
    file = write(PLAIN) / name
    file.write_text(file.read_text()[:-9])
    with pytest.raises(BrokenCheckpoint, match="cannot be read"):
        load_tokenizer(file.parent)


@pytest.mark.real_model
def test_the_default_tokenizer_is_that_of_auto_tokenizer(real_tokenizer, model_directory):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_directory)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert real_tokenizer.encode(text) == ids
        assert real_tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert real_tokenizer.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert (real_tokenizer.eos_token_id, real_tokenizer.vocab_size) == (theirs.eos_token_id, len(theirs))
    assert real_tokenizer.chat_template == theirs.chat_template


@pytest.mark.real_model
def test_loading_the_default_tokenizer_imports_neither_torch_nor_transformers(model_directory):
    script = (
        "import sys; from minipaged.text.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]); "
        "print({'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script, model_directory], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
