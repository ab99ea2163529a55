"""After warm_up no kernel is compiled, whatever is called: native kernels on the fake accelerator."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from instruments.fakedev import NAME, accelerator
from random_calls import Caller
from triton import knobs

import kvcache.kernels
from kvcache import CacheConfig, KVCacheManager, parse_checkpoints
from kvcache.kernels.launch import Kernel

# every lane is unrolled on the CPU, so the blocks are smaller than on a GPU
BLOCK = 16
CALLS = 600


def modules() -> Iterator[Any]:
    for module in pkgutil.iter_modules(kvcache.kernels.__path__, "kvcache.kernels."):
        yield importlib.import_module(module.name)


@pytest.fixture
def kernels() -> Iterator[set[str]]:
    """All kernels, as if none had been launched; yields their names."""
    from instruments.cpu_driver import CpuDriver
    from instruments.recording import driven_by

    names = set()
    with pytest.MonkeyPatch.context() as patch, driven_by(CpuDriver()):
        for module in modules():
            for name, value in vars(module).items():
                if isinstance(value, Kernel) and value.function.__module__ == module.__name__:
                    patch.setattr(value, "_jit", None)
                    names.add(name)
                if name.startswith(("_BLOCK", "_HASH_BLOCK")):
                    patch.setattr(module, name, min(value, BLOCK))
        yield names


@pytest.mark.slow
@pytest.mark.parametrize(("window", "bigram"), [(6, False), (None, True)])
def test_no_kernel_is_compiled_after_warm_up(
    window: int | None, bigram: bool, kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def note(**seen: Any) -> None:
        compiled.append(seen["fn"].name.split(".")[-1])

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    with accelerator():
        config = CacheConfig(
            page_size=4,
            window=window,
            full_pages=40,
            swa_pages=24 if window else 0,
            max_rows=6,
            max_len=64,
            bigram=bigram,
            checkpoints=parse_checkpoints("branch,hints"),
            max_namespaces=4,
            device=NAME,
        )
        cache = KVCacheManager(config)
        cache.warm_up()
        windowed = {"_slide_kernel", "_translate_kernel"}
        assert set(compiled) == (kernels if window else kernels - windowed)
        num = len(compiled)
        caller = Caller(cache, "native")
        caller.run(CALLS)
        cache.check()
    assert compiled[num:] == []
    assert caller.calls["match"] > 30
    assert caller.calls["translate"] > 10 or not window
