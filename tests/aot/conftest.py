"""Compile for GPUs without one. Needs a process in which triton is not in interpreter mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from instruments.mode import interpreter_is_on

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all of this folder in interpreter mode: nothing compiles then."""
    if not interpreter_is_on():
        return
    reason = "triton runs in interpreter mode: run tests/aot without TRITON_INTERPRET"
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
