"""Shared by all tests: the helpers' import path, and poison in buffers that nobody has written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# timings are no tests; the same examples in every run of the suite, new ones in a soak
settings.register_profile(
    "suite",
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "soak",
    settings.get_profile("suite"),
    max_examples=500,
    stateful_step_count=100,
    derandomize=False,
)
# a planted bug need not be shrunk
settings.register_profile(
    "mutants", settings.get_profile("suite"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("suite")

# rooms whose helpers others share, and the instruments; never the root of the repository
TESTS = Path(__file__).parent
ROOMS = ("device", "kernels", "manager", "model", "oracle", "replay")
sys.path[:0] = [str(TESTS), *(str(TESTS / room) for room in ROOMS)]


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = make(*args, **kwargs)
        if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
            return x
        return x.fill_(torch.iinfo(x.dtype).min // 2)

    return empty


@pytest.fixture(autouse=True, scope="session")
def poison_empty() -> Iterator[None]:
    """Fill fresh integer buffers with garbage, so that an entry nobody wrote is seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _poisoned(torch.empty))
        patch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
        patch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))
        yield
