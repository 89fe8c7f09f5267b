import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from minipaged.errors import InvalidPrompt
from minipaged.text.chat_template import continue_conversation, encode_chat, render
from minipaged.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>' + messages[0]['content'] + '<</SYS>>' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% set text = '<h>' + m['role'] + '</h>\n\n' + m['content'] | trim + eos_token %}"
    "{{ bos_token + text if loop.first else text }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<h>assistant</h>\n\n' }}{% endif %}"
)
SHOUTING = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
REPEATING = "{% for m in messages %}{{ m['content'] + m['content'] }}{% endfor %}"
SYSTEM_LAST = (  # the system's words stand before the last message, so that earlier turns change with each new one
    "{% for m in messages[1:] %}{% if loop.last %}{{ messages[0]['content'] }}{% endif %}{{ m['content'] }}{% endfor %}"
)

HI = [{"role": "user", "content": "Hi"}]
TURN = [*HI, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"}]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture
def chat(byte_level):
    """The byte-level tokenizer with a template; by itself it begins each text with <s>."""
    backend = Backend.from_str(byte_level._backend.to_str())
    begin = byte_level.encode("<s>")[0]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return lambda template: Tokenizer(backend, byte_level.special_tokens, template)


def answer(tokenizer, messages, text: str, ended: bool = True) -> list[int]:
    """The token ids of a conversation up to an answer that a model gave."""
    end = [tokenizer.eos_token_id] if ended else []
    return encode_chat(tokenizer, messages) + tokenizer.encode(text, add_special_tokens=False) + end


def test_a_conversation_is_rendered_with_the_beginning_of_the_answer(chat):
    assert render(chat(CHATML), HI) == "<s>user\nHi</s>\n<s>assistant\n"
    assert render(chat(CHATML), HI, add_generation_prompt=False) == "<s>user\nHi</s>\n"
    assert render(chat(LLAMA_2), [SYSTEM, *HI]) == "<s>[INST] <<SYS>>Be brief.<</SYS>>Hi [/INST]"


def test_the_template_alone_decides_about_special_tokens(chat):
    tokenizer = chat(LLAMA_3)
    ids = encode_chat(tokenizer, HI)
    assert tokenizer.decode(ids, skip_special_tokens=False) == render(tokenizer, HI)
    assert ids.count(tokenizer.encode("")[0]) == 1


@pytest.mark.parametrize("template", [CHATML, LLAMA_3, LLAMA_2])
@pytest.mark.parametrize("first", [HI, [SYSTEM, *HI]], ids=["user", "system"])
@pytest.mark.parametrize("ended", [True, False])
def test_a_continued_conversation_is_what_the_template_writes_behind_the_same_tokens(chat, template, first, ended):
    tokenizer = chat(template)
    space = " " if template is LLAMA_2 else ""
    kept = answer(tokenizer, first, space + "Hello", ended)
    messages = [*first, *TURN[1:]]
    continued = continue_conversation(tokenizer, messages, kept)
    assert continued[: len(kept)] == kept
    text = tokenizer.decode(continued, skip_special_tokens=False)
    if ended:  # Llama 2's template writes a space before the end of an answer, which the model did not
        assert text == render(tokenizer, messages).replace("Hello </s>", "Hello</s>")
    else:
        assert text == render(tokenizer, messages)


def test_the_answer_keeps_the_tokens_in_which_the_model_gave_it(chat):
    tokenizer = chat(CHATML)
    odd = answer(tokenizer, HI, "something else than the text says")
    assert continue_conversation(tokenizer, TURN, odd)[: len(odd)] == odd


def test_several_turns_continue_one_another(chat):
    tokenizer, messages = chat(CHATML), list(HI)
    ids = encode_chat(tokenizer, messages)
    for turn in range(3):
        ids = [*ids, *tokenizer.encode(f"answer {turn}", add_special_tokens=False), tokenizer.eos_token_id]
        messages += [{"role": "assistant", "content": f"answer {turn}"}, {"role": "user", "content": f"more {turn}"}]
        ids = continue_conversation(tokenizer, messages, ids)
        assert ids == encode_chat(tokenizer, messages)


@pytest.mark.parametrize("template", [SHOUTING, REPEATING], ids=["changes", "repeats"])
def test_a_template_that_changes_or_repeats_an_answer_cannot_be_continued(chat, template):
    tokenizer = chat(template)
    assert continue_conversation(tokenizer, TURN, answer(tokenizer, HI, "Hello")) is None


def test_a_template_that_now_writes_something_else_before_the_answer_cannot_be_continued(chat):
    tokenizer = chat(SYSTEM_LAST)
    first = [SYSTEM, *HI]
    assert continue_conversation(tokenizer, [SYSTEM, *TURN], answer(tokenizer, first, "Hello")) is None


def test_without_an_answer_there_is_nothing_to_continue(chat):
    assert continue_conversation(chat(CHATML), HI, []) is None


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ("Hi", "messages = 'Hi'"),
        ([], "non-empty"),
        (["Hi"], r"messages\[0\] = 'Hi'"),
        ([*HI, {"role": "robot", "content": "x"}], r"messages\[1\]\['role'\] = 'robot'.*assistant"),
        ([{"content": "x"}], r"\['role'\] = None"),
        ([{"role": "user"}], r"\['content'\] = None"),
        ([{"role": "user", "content": 3}], r"\['content'\] = 3"),
    ],
)
def test_malformed_messages_are_refused_by_name(chat, messages, named):
    for call in (render, encode_chat, lambda *args: continue_conversation(*args, [])):
        with pytest.raises(InvalidPrompt, match=named):
            call(chat(CHATML), messages)


def test_a_model_without_a_template_says_so(byte_level):
    with pytest.raises(InvalidPrompt, match="no chat template"):
        render(byte_level, HI)


def test_a_refusal_of_the_template_is_passed_on(chat):
    with pytest.raises(InvalidPrompt, match="roles must alternate"):
        render(chat(LLAMA_2), HI + HI)


@pytest.mark.real_model
def test_the_default_template_is_rendered_as_transformers_does(real_tokenizer, model_directory):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model_directory)
    for messages in (HI, TURN, [SYSTEM, *TURN]):
        for generation in (True, False):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=generation, tokenize=False)
            assert render(real_tokenizer, messages, generation) == expected
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert encode_chat(real_tokenizer, messages) == ids


@pytest.mark.real_model
@pytest.mark.parametrize("ended", [True, False])
def test_a_chat_with_the_default_model_goes_on_as_encoding_it_anew_would(real_tokenizer, ended):
    kept = answer(real_tokenizer, HI, "Hello", ended)
    assert continue_conversation(real_tokenizer, TURN, kept) == encode_chat(real_tokenizer, TURN)
