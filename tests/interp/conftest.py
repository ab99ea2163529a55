"""Kernels under Triton's interpreter. Needs a process of its own: the mode is fixed at triton's import."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from instruments.mode import interpreter_is_on

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all of this folder if triton was imported before the variable could be set."""
    if interpreter_is_on():
        return
    reason = (
        "triton is imported without TRITON_INTERPRET=1: run tests/interp in a process of its own"
    )
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def fast_interpreter() -> Iterator[None]:
    """The interpreter without its redundant work."""
    from instruments.fast_interpreter import fast_interpreter

    with fast_interpreter():
        yield


@pytest.fixture(autouse=True)
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPU tensors take the kernel, not the twin."""
    monkeypatch.setattr("kvcache.kernels.launch.takes_kernel", lambda tensor: True)
