"""Shared settings: how many examples property tests draw, and where the real model lives."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Waiting threads sleep instead of spinning: on a busy machine a test run is otherwise ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import HealthCheck, Phase, settings

# Shared machines stall for seconds at times: no deadline, and no judgement of how long drawing an example took.
_PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", max_examples=100, derandomize=True, **_PATIENT)
settings.register_profile("all", max_examples=2000, **_PATIENT)
# For `python -m tests.breaks`, which knows what is broken and wants no smallest example of it.
_FIND_ONE = {"phases": (Phase.explicit, Phase.generate), "report_multiple_bugs": False}
settings.register_profile("break", max_examples=100, derandomize=True, **_PATIENT, **_FIND_ONE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the slow tests, and thousands of property examples")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("all" if config.getoption("--all") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    skip = pytest.mark.skip(reason="slow: runs with --all (make test-all)")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
