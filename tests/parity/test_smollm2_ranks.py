"""The real model over 3 ranks, as its 3 KV heads allow: transformers' tokens, by the rule of test_smollm2."""

from __future__ import annotations

import pytest

from minipaged import LLM, SamplingParams
from minipaged.bench.__main__ import main
from tests.parity.test_smollm2 import assert_same_as_transformers
from tests.real_model import PROMPTS

pytestmark = pytest.mark.real_model


def assert_same_over_three_ranks(prompts, num_tokens):
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(max_model_len=2048, tensor_parallel_size=3) as llm:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
    assert_same_as_transformers(outputs, num_tokens)


def test_two_prompts_over_three_ranks():
    assert_same_over_three_ranks(PROMPTS[3:18:14], num_tokens=24)


@pytest.mark.slow
def test_ten_prompts_over_three_ranks():
    assert_same_over_three_ranks(PROMPTS[::2], num_tokens=64)


@pytest.mark.slow
def test_the_command_prints_what_crosses_in_a_step(capsys):
    assert main(["ranks", "--requests", "2", "--max-model-len", "512"]) == 0
    printed = capsys.readouterr().out
    [decode] = [line for line in printed.splitlines() if line.startswith("│ decode  ")]
    _, _, rows, tokens, plan_bytes, _, _, *collectives = decode.strip("│ ").split("│")
    assert (int(rows), int(tokens)) == (2, 2)
    assert int(plan_bytes) == 4 * (6 + 2 * 7 + 3)  # a header, two rows with a token each, a list of two
    assert [int(count) for count in collectives] == [2, 61, 1]
    assert "1 + 2 × 30 = 61 times" in printed
