"""Kernels natively on the CPU. Needs llvmlite, and a process without Triton's interpreter mode."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from instruments.mode import interpreter_is_on

HERE = Path(__file__).parent


def why_not() -> str | None:
    """The reason why nothing here can run, if there is one."""
    if interpreter_is_on():
        return "triton runs in interpreter mode: run tests/native without TRITON_INTERPRET"
    try:
        importlib.import_module("instruments.cpu_lowering")
    except ImportError as error:
        return f"NATIVE KERNEL TESTS DO NOT RUN: Triton's passes or llvmlite moved: {error}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all of this folder, saying why, where kernels cannot be lowered to the CPU."""
    reason = why_not()
    if reason is None:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="package")
def fresh_triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile anew: the tests must not see what an earlier run left in the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv(
            "TRITON_DEFAULT_FP_FUSION", "1"
        )  # the kernels have no floats; silences a warning
        yield
