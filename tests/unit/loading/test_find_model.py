"""Which model a name means."""

from __future__ import annotations

import pytest
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

from minipaged.errors import ModelNotFound
from minipaged.loading import find_model


def test_a_directory_is_itself_as_text_and_as_a_path(tmp_path):
    assert find_model(tmp_path) == tmp_path
    assert find_model(str(tmp_path)) == tmp_path


def test_a_directory_in_the_home_may_be_written_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert find_model("~/models") == tmp_path / "models"


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/directory", "./no/such.gguf", "a/b/c", ""])
def test_a_name_that_leads_nowhere_says_what_was_tried(name):
    with pytest.raises(ModelNotFound, match="no such file or directory"):
        find_model(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFound, match="directory"):
        find_model(tmp_path / "model.safetensors")


def test_a_hub_id_is_asked_of_the_hub_and_a_refusal_is_passed_on(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="no-such-org/no-such-model.*the hub gave none"):
        find_model("no-such-org/no-such-model", progress=False)


def test_only_what_is_needed_is_fetched_from_the_hub(monkeypatch, tmp_path):
    asked = {}
    enable_progress_bars()  # transformers, where another test told it to be quiet, has told this library too

    def snapshot_download(hub_id, allow_patterns):
        asked.update(hub_id=hub_id, patterns=allow_patterns, silent=are_progress_bars_disabled())
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert find_model("org/name.v2", progress=False) == tmp_path
    assert asked["hub_id"] == "org/name.v2"
    assert asked["silent"] and not are_progress_bars_disabled()
    assert "config.json" in asked["patterns"]
    assert not any(pattern.endswith(("bin", "pth")) or pattern == "*" for pattern in asked["patterns"])
