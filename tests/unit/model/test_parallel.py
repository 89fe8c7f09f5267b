"""The layers that split: each rank holds its part of the weights, and together they compute what one rank does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minipaged.config import ModelConfig
from minipaged.errors import InvalidParameter
from minipaged.loading import read_weights
from minipaged.model.attention import make_backend
from minipaged.model.llama import Llama
from minipaged.model.parallel import weight_bytes
from minipaged.model.ranks import check_split, split, split_heads
from minipaged.model.weights import load_weights
from tests.thread_ranks import all_ranks, in_threads
from tests.tiny_llama import PagedPool, TinyLlama, random_prompt, tiny_llama

NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 36}  # SmolLM2's
LAYER = "model.layers.1."


def model_of_rank(tiny: TinyLlama, ranks, backend="gather") -> Llama:
    model = Llama(tiny.config, make_backend(backend), torch.float64, "cpu", ranks)
    load_weights(model, tiny.weights().items())
    return model


def logits_over_ranks(tiny: TinyLlama, size: int, backend: str) -> torch.Tensor:
    """Two prompts in one batch, then two more tokens of each."""

    def run(ranks):
        pool = PagedPool(model_of_rank(tiny, ranks, backend), block_size=4)
        first = pool.feed({0: random_prompt(9, 0), 1: random_prompt(6, 1)})
        second = pool.feed({0: [5, 3], 1: [7, 1]})
        return torch.cat([*first.values(), *second.values()])

    return in_threads(all_ranks(size), run)[0]


@pytest.mark.parametrize(
    ("shape", "changes", "size"),
    [
        ("mha", {}, 2),
        ("mha", {}, 4),
        ("gqa", {}, 2),
        ("gqa", {}, 4),  # two ranks share each KV head
        ("mqa", {}, 4),
        ("biases", {}, 4),
        ("tied", {}, 4),
        ("wide_heads", {}, 2),
        ("gqa", NINE_HEADS, 3),
        ("gqa", NINE_HEADS, 9),
        ("biases", {**NINE_HEADS, "tie_word_embeddings": True, "intermediate_size": 50}, 3),
    ],
)
@pytest.mark.parametrize("backend", ["gather", "reference"])
def test_ranks_together_compute_the_logits_of_one(shape, changes, size, backend):
    tiny = tiny_llama(shape, **changes)
    pool = PagedPool(tiny.model(backend), block_size=4)
    first = pool.feed({0: random_prompt(9, 0), 1: random_prompt(6, 1)})
    second = pool.feed({0: [5, 3], 1: [7, 1]})
    one = torch.cat([*first.values(), *second.values()])
    assert (logits_over_ranks(tiny, size, backend) - one).abs().max() < 1e-9


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_its_rows_and_columns_of_each_weight_and_no_more(size):
    tiny = tiny_llama("gqa")  # 4 heads and 2 KV heads of 8, MLP 48, vocabulary 61
    whole = tiny.weights()
    for ranks in all_ranks(size):
        own = dict(model_of_rank(tiny, ranks).named_parameters())
        rank = ranks.rank
        q, mlp = 32 // size, 48 // size
        kv = slice(rank * 2 // size * 8, rank * 2 // size * 8 + max(16 // size, 8))
        vocab = -(-61 // size)
        expected = {
            f"{LAYER}self_attn.q_proj.weight": whole[f"{LAYER}self_attn.q_proj.weight"][rank * q : (rank + 1) * q],
            f"{LAYER}self_attn.k_proj.weight": whole[f"{LAYER}self_attn.k_proj.weight"][kv],
            f"{LAYER}self_attn.v_proj.weight": whole[f"{LAYER}self_attn.v_proj.weight"][kv],
            f"{LAYER}self_attn.o_proj.weight": whole[f"{LAYER}self_attn.o_proj.weight"][:, rank * q : (rank + 1) * q],
            f"{LAYER}mlp.gate_proj.weight": whole[f"{LAYER}mlp.gate_proj.weight"][rank * mlp : (rank + 1) * mlp],
            f"{LAYER}mlp.down_proj.weight": whole[f"{LAYER}mlp.down_proj.weight"][:, rank * mlp : (rank + 1) * mlp],
            f"{LAYER}input_layernorm.weight": whole[f"{LAYER}input_layernorm.weight"],
            "model.embed_tokens.weight": whole["model.embed_tokens.weight"][rank * vocab : (rank + 1) * vocab],
            "lm_head.weight": whole["lm_head.weight"][rank * vocab : (rank + 1) * vocab],
        }
        for name, tensor in expected.items():
            assert torch.equal(own[name], tensor), name


def test_three_ranks_hold_a_third_of_everything_but_the_norms():
    tiny = tiny_llama("gqa", **NINE_HEADS, vocab_size=60)
    models = [model_of_rank(tiny, ranks) for ranks in all_ranks(3)]
    norms = sum(tensor.nbytes for name, tensor in tiny.weights().items() if "norm" in name)
    split_bytes = sum(tensor.nbytes for tensor in tiny.weights().values()) - norms
    assert [weight_bytes(model) for model in models] == [split_bytes // 3 + norms] * 3
    stored = [sum(p.untyped_storage().nbytes() for p in model.parameters()) for model in models]
    assert stored == [weight_bytes(model) for model in models]  # no part keeps the whole alive


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells which pages were touched")
def test_of_a_mapped_file_a_rank_reads_only_the_pages_of_its_part(tmp_path):
    tiny = tiny_llama("gqa", vocab_size=8192, hidden_size=256, head_dim=8)
    directory = tiny.save(tmp_path)  # embedding and head: 16 MiB each
    [ranks, _, _, _] = all_ranks(4)
    model = Llama(tiny.config, make_backend("gather"), torch.float64, "cpu", ranks)

    def weights():
        for name, tensor in read_weights(directory):
            yield name, tensor
            if name == "lm_head.weight":
                seen.append((tensor.nbytes, resident_bytes(directory / "model.safetensors", tensor)))

    seen = []
    load_weights(model, weights())
    [(whole, read)] = seen
    assert whole == 8192 * 256 * 8
    assert whole / 4 <= read <= whole / 2  # the system maps a few pages around each that is touched


def resident_bytes(path, tensor) -> int:
    """Of the mapping that `tensor` lies in, how much this process has touched (Linux)."""
    at = tensor.data_ptr()
    with open("/proc/self/smaps") as file:
        inside = False
        for line in file:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                low, high = (int(end, 16) for end in head.split("-"))
                inside = low <= at < high
            elif inside and head == "Rss:":
                return int(line.split()[1]) * 1024
    raise AssertionError("the tensor is in no mapping")


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("whole", [7, 12, 61])
def test_shares_are_in_order_and_cover_everything_once(size, whole):
    shares = [split(whole, ranks) for ranks in all_ranks(size)]
    assert [i for share in shares for i in range(share.start, share.stop)] == list(range(whole))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 4), (8, 2, 2), (8, 2, 4), (8, 1, 8), (12, 3, 6)])
def test_every_head_is_with_one_rank_and_finds_its_kv_head_there(heads, kv_heads, size):
    seen = []
    for ranks in all_ranks(size):
        own, own_kv = split_heads(heads, ranks), split_heads(kv_heads, ranks)
        seen += range(own.start, own.stop)
        group = own.size // own_kv.size  # attention pairs local heads with local KV heads in this way
        for local, head in enumerate(range(own.start, own.stop)):
            assert own_kv.start + local // group == head // (heads // kv_heads)
    assert seen == list(range(heads))


SHAPE = ModelConfig(61, 32, 48, 2, 12, 4, 8, 256)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (5, "must divide the model's 12 attention heads"),
        (24, "must divide the model's 12 attention heads"),
        (6, "must divide the model's 4 KV heads, or be a multiple of them"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(size, message):
    with pytest.raises(InvalidParameter, match=f"tensor_parallel_size = {size}: {message}"):
        check_split(SHAPE, size)


def test_a_rank_with_nothing_is_refused():
    with pytest.raises(InvalidParameter, match="a MLP of 5 leaves a rank with nothing"):
        check_split(replace(SHAPE, intermediate_size=5), 4)
    for size in (1, 2, 4):
        check_split(SHAPE, size)
