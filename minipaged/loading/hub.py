"""The Hugging Face hub, through its own client, which keeps a cache and knows tokens, mirrors and offline mode."""

from __future__ import annotations

import re
from pathlib import Path

from minipaged.errors import ModelNotFound

# What this program reads; the rest of a repository (pickles, other frameworks' copies) stays where it is.
NEEDED_FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
]


def is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def fetch_from_hub(hub_id: str, progress: bool) -> Path:
    """The repository's snapshot in huggingface_hub's cache. Raises ModelNotFound, with the client's own reason."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silenced = not progress and not are_progress_bars_disabled()
    if silenced:
        disable_progress_bars()
    try:
        return Path(snapshot_download(hub_id, allow_patterns=NEEDED_FILES))
    except (OSError, ValueError) as error:  # the client's errors: no such repository, gated, no network, offline, …
        raise ModelNotFound("model", hub_id, f"there is no such directory, and the hub gave none: {error}") from error
    finally:
        if silenced:
            enable_progress_bars()
