"""The path of a file that is to be written when all is done: what is wrong with it is said before the work begins."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def output_path(text: str) -> Path:
    """A type for argparse. Creates nothing."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a file that can be written, in a directory that exists")
    return path
