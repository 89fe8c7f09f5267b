"""The default model and transformers' twin of it, loaded once for all tests, and twenty prompts of mixed length."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from minipaged import LLM
from minipaged.loading import find_model

_LICENSE = (Path(__file__).parents[1] / "LICENSE").read_text()

# Short and long, several languages, code, lists, dialogue: what a tokenizer and a context meet in real life.
PROMPTS = [
    "The capital of France is",
    "Hi",
    "1, 1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "def fibonacci(n):\n    ",
    "La plus grande ville du monde est",
    "Die Würde des Menschen ist",
    "人工智能的未来是",
    "Q: What is the boiling point of water at sea level?\nA:",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "The three laws of thermodynamics are:\n1.",
    "🙂🙃🙂🙃🙂",
    "Monday, Tuesday, Wednesday, Thursday,",
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer",
    _LICENSE[200:500],
    _LICENSE[1000:1600],
    _LICENSE[3000:3300],
    _LICENSE[5000:6200],
    "Translate to French: 'The weather is nice today.'\nTranslation:",
]


@functools.cache
def hf_model(dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(find_model(), dtype=dtype, attn_implementation="sdpa").eval()


@functools.lru_cache(maxsize=1)  # one engine at a time: each holds the weights
def our_llm(**engine_args) -> LLM:
    return LLM(**engine_args)
