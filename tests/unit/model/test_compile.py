"""The compiled model: transformers' logits, from one graph for all layers and all steps; and a compiler that fails."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import fresh_cache

from minipaged.engine_args import EngineArgs
from minipaged.errors import InvalidParameter
from minipaged.model.compile import compile_layers
from minipaged.worker.worker import Worker
from tests.tiny_llama import PagedPool, tiny_llama


@pytest.fixture(autouse=True)
def no_silent_fallback():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def test_one_graph_runs_all_layers_in_all_steps_and_gives_the_logits_of_transformers():
    tiny = tiny_llama("gqa", num_hidden_layers=3)
    model = tiny.model("compiled")
    compile_layers(model)
    pool = PagedPool(model, block_size=4)
    graphs_before = counters["stats"]["unique_graphs"]
    fed, logits = {0: [], 1: [], 2: []}, {0: [], 1: [], 2: []}
    for step in (
        {0: [5]},  # one decode
        {1: [*range(1, 20)]},  # one prefill
        {2: [7, 8], 0: [3]},
        {0: [3], 1: [4], 2: [9]},
        {0: [1, 2, 3], 2: [6]},
        {1: [11]},
        {0: [8], 1: [1], 2: [2, 2, 2, 2, 2]},
    ):
        for seq_id, rows in pool.feed(step).items():
            logits[seq_id].append(rows)
            fed[seq_id] += step[seq_id]
    for seq_id, token_ids in fed.items():
        assert (torch.cat(logits[seq_id]) - tiny.logits(token_ids)).abs().max() < 1e-9
    assert counters["stats"]["unique_graphs"] == graphs_before + 1


def test_two_models_of_the_same_shape_keep_their_own_graphs_and_any_pool_will_do():
    """A compiled layer looks at nothing that its graph takes for granted: other numbers must be another graph's."""
    graphs_before = counters["stats"]["unique_graphs"]
    for eps, num_blocks in ((1e-5, 8), (0.5, 31), (1e-5, 16)):
        tiny = tiny_llama("gqa", num_hidden_layers=2, rms_norm_eps=eps)
        model = tiny.model("compiled")
        compile_layers(model)
        for pool in (PagedPool(model, block_size=4), PagedPool(model, block_size=4, num_blocks=num_blocks)):
            logits = pool.feed({0: [3, 1, 4, 1, 5]})[0]
            assert (logits - tiny.logits([3, 1, 4, 1, 5])).abs().max() < 1e-9
    assert counters["stats"]["unique_graphs"] == graphs_before + 3


def test_two_models_that_are_compiled_in_two_threads_do_not_get_each_others_program():
    tinies = [tiny_llama("gqa", num_hidden_layers=2, rms_norm_eps=eps) for eps in (1e-5, 0.5)]
    models = [tiny.model("compiled") for tiny in tinies]
    for model in models:
        compile_layers(model)
    pools = [PagedPool(model, block_size=4) for model in models]
    token_ids = [3, 1, 4, 1, 5]
    with ThreadPoolExecutor() as threads:
        logits = list(threads.map(lambda pool: pool.feed({0: token_ids})[0], pools))
    for tiny, found in zip(tinies, logits, strict=True):
        assert (found - tiny.logits(token_ids)).abs().max() < 1e-9


def test_a_layer_once_compiled_outlives_what_torch_forgets():
    tiny = tiny_llama("gqa", num_hidden_layers=2)
    model = tiny.model("compiled")
    compile_layers(model)
    pool = PagedPool(model, block_size=4)
    logits = [pool.feed({0: [3, 1, 4]})[0]]
    torch._dynamo.reset()
    gc.collect()
    logits.append(pool.feed({0: [1, 5]})[0])
    assert (torch.cat(logits) - tiny.logits([3, 1, 4, 1, 5])).abs().max() < 1e-9


def test_a_step_of_a_compiled_model_calls_the_generated_code_and_nothing_around_it(monkeypatch):
    tiny = tiny_llama("gqa", num_hidden_layers=2)
    model = tiny.model("compiled")
    compile_layers(model)
    pool = PagedPool(model, block_size=4)
    logits = [pool.feed({0: [3, 1, 4]})[0]]
    monkeypatch.setattr(CompiledFxGraph, "__call__", lambda *_: pytest.fail("torch's own wrapper was called"))
    logits.append(pool.feed({0: [1, 5]})[0])
    assert (torch.cat(logits) - tiny.logits([3, 1, 4, 1, 5])).abs().max() < 1e-9


def test_one_process_may_compile_more_models_than_torch_keeps_of_one_function():
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1):
        for _ in range(3):
            tiny = tiny_llama("gqa", num_hidden_layers=1)
            model = tiny.model("compiled")
            compile_layers(model)
            logits = PagedPool(model, block_size=4).feed({0: [3, 1, 4]})[0]
            assert (logits - tiny.logits([3, 1, 4])).abs().max() < 1e-9


@pytest.mark.parametrize("stance", ["force_eager", "eager_then_compile"])
def test_a_torch_that_must_not_compile_is_told_from_one_that_has(stance):
    tiny = tiny_llama("gqa")
    model = tiny.model("compiled")
    compile_layers(model)
    pool = PagedPool(model, block_size=4)
    refused = pytest.raises(InvalidParameter, match="enforce_eager = False: torch.compile is switched off here")
    with torch.compiler.set_stance(stance), refused:
        pool.feed({0: [3]})
    logits = PagedPool(model, block_size=4).feed({0: [3]})[0]
    assert (logits - tiny.logits([3])).abs().max() < 1e-9


def test_the_weights_of_one_layer_do_not_become_constants_of_the_program_for_all():
    tiny = tiny_llama("gqa", num_hidden_layers=3)
    model = tiny.model("compiled")
    compile_layers(model)
    with torch._inductor.config.patch(freezing=True):
        logits = PagedPool(model, block_size=4).feed({0: [3, 1, 4]})[0]
    assert (logits - tiny.logits([3, 1, 4])).abs().max() < 1e-9


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_compiler_that_fails_is_named_before_any_request_comes(tmp_path, enforce_eager):
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\ncase "$1" in --version) echo g++ 12; exit 0;; esac\necho no Python.h >&2\nexit 1\n')
    compiler.chmod(0o755)
    model = tiny_llama().save(tmp_path / "model")
    args = EngineArgs(model, enforce_eager=enforce_eager, attention_backend="compiled", skip_tokenizer_init=True)
    with torch._inductor.config.patch("cpp.cxx", (str(compiler),)), fresh_cache(dir=str(tmp_path)):
        torch._inductor.cpp_builder.cpp_compiler_search.cache_clear()
        with pytest.raises(InvalidParameter, match="(?s)attention_backend = 'compiled': needs a C.*no Python.h"):
            Worker(args).load(max_num_batched_tokens=16)
