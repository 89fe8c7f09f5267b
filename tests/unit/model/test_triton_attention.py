"""The Triton backend as far as it goes without a GPU: refusals, kernels that compile, and the tests in the interpreter.

Whether kernels are interpreted is settled when triton is imported, so those tests run in a process of their own:
`TRITON_INTERPRET=1 python -m pytest tests/unit/model/interpreted_triton.py`.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minipaged.engine_args import EngineArgs
from minipaged.errors import InvalidParameter
from minipaged.model.attention import make_backend
from minipaged.worker.worker import Worker
from tests.tiny_llama import tiny_llama

HERE = Path(__file__).parent
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install minipaged[triton]"
)
needs_compiler = pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET=1: here nothing is compiled")


@needs_triton
def test_the_kernels_pass_their_tests_in_the_interpreter(request):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short"]
    for option, given in (("--all", "--all"), ("--hypothesis-profile", "--hypothesis-profile={}")):
        if value := request.config.getoption(option):
            command.append(given.format(value))
    done = subprocess.run(
        [*command, str(HERE / "interpreted_triton.py")],
        cwd=HERE.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_machine_without_triton_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(InvalidParameter, match=r"^attention_backend = 'triton': needs triton: pip install minipaged"):
        make_backend("triton")


def test_a_compiled_model_does_not_take_it():
    with pytest.raises(InvalidParameter, match="attention_backend = 'triton': with enforce_eager=False choose auto or"):
        make_backend("triton", compiled_model=True)


@needs_triton
@needs_compiler
def test_a_cpu_is_refused_before_any_weight_is_read(tmp_path):
    directory = tiny_llama("gqa", head_dim=64).save(tmp_path)
    (directory / "model.safetensors").unlink()
    with pytest.raises(
        InvalidParameter, match="device = 'cpu': attention_backend='triton' needs cuda, or Triton's int"
    ):
        Worker(EngineArgs(directory, skip_tokenizer_init=True, device="cpu", attention_backend="triton"))


@needs_triton
@needs_compiler
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "group"),
    [
        (torch.bfloat16, 128, 16, 4),
        (torch.float32, 64, 16, 3),
        pytest.param(torch.float16, 80, 32, 1, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 96, 64, 32, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 256, 128, 8, marks=pytest.mark.slow),
        pytest.param(torch.float32, 256, 128, 8, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_compile_for_a_gpu_and_fit_into_its_shared_memory(
    monkeypatch, tmp_path, dtype, head_dim, block_size, group, capability
):
    from tests.unit.model.compiled_triton import compile_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, kernel in compile_kernels(dtype, head_dim, block_size, group, capability).items():
        assert kernel.metadata.shared <= 99 * 1024  # the least that a card since Ampere lets one program have
        if name in ("attend_parts", "attend_chunks"):
            uses_matrix_units = any(word in kernel.asm["ptx"] for word in ("mma.sync", "wgmma"))
            assert uses_matrix_units == (dtype != torch.float32)  # float32 is not rounded to what they take
