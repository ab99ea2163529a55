"""A manager whose kernels are interpreted against one on the CPU twins, call by call.

On the fake accelerator, so that every call is watched besides: it neither waits nor costs more than it may.
"""

from __future__ import annotations

import pytest
from operation_log import CONFIGS, assert_same, record, replay, replay_watched

CALLS = 120


@pytest.fixture(autouse=True)
def twins_on_cpu(kernels_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library has it, unlike elsewhere in this folder."""
    monkeypatch.setattr("kvcache.kernels.launch.takes_kernel", lambda tensor: not tensor.is_cpu)


@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_and_twins_come_to_the_same_state(name: str) -> None:
    log = record(f"interp/{name}", CONFIGS[name], CALLS)
    assert_same(log, replay_watched(log, lag=2), replay(log))
