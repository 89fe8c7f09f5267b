"""Directories that are whole or not there at all.

A conversion takes seconds and may be interrupted at any of them; two programs may start at once. So a directory is
built under another name and takes its own only when every byte is on the disk, by one rename, which is atomic:

    NAME.lock        held by the process that builds; the system releases it when that process ends, however it ends
    NAME.building    half-made. Whoever holds the lock and finds one knows that its builder is dead, and removes it
    NAME             whole

A reader looks only for NAME and needs no lock.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from minipaged.errors import ModelNotFound

CONVERSION = 1  # raise it when the converters write something else: what earlier ones wrote is then made anew


def cache_directory() -> Path:
    """`$MINIPAGED_CACHE`, else `$XDG_CACHE_HOME/minipaged`, else `~/.cache/minipaged`."""
    if own := os.environ.get("MINIPAGED_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minipaged"


def converted_directory(name: str) -> Path:
    return cache_directory() / f"converted-{CONVERSION}" / name


def make_once(final: Path, build: Callable[[Path], None]) -> Path:
    """`final`, which is made first if it is not there, by `build(directory)` filling an empty directory.

    What `build` raises passes through, and nothing is left behind. A process that comes while another one builds waits.
    Raises ModelNotFound where the cache folder cannot be written.
    """
    if final.is_dir():
        return final
    try:
        return _make(final, build)
    except OSError as error:
        allowed = f"the cache folder cannot be used ({error}); MINIPAGED_CACHE names another one"
        raise ModelNotFound("cache folder", str(cache_directory()), allowed) from error


def _make(final: Path, build: Callable[[Path], None]) -> Path:
    from filelock import FileLock  # only a first start needs it

    final.parent.mkdir(parents=True, exist_ok=True)
    building = final.with_name(final.name + ".building")
    with FileLock(final.with_name(final.name + ".lock")):
        if final.is_dir():  # made by another process while this one waited
            return final
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            build(building)
            _flush_to_disk(building)
            os.rename(building, final)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return final


def _flush_to_disk(directory: Path) -> None:
    """Without this a power failure could keep the rename and lose the bytes."""
    for path in directory.iterdir():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
