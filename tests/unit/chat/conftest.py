"""A session over a shadow worker, with the default model's tokenizer."""

from __future__ import annotations

import pytest

from minipaged.loading import find_model
from minipaged.text.tokenizer import load_tokenizer
from tests.unit.chat.test_chat import make_session


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(find_model())


@pytest.fixture
def session(tokenizer):
    return make_session(tokenizer)
