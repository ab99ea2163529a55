"""Runs the examples' engine under poison and compares its logits with the model that has no cache."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from kvcache import CacheConfig, KVCacheManager
from kvcache.device.decode_step import DecodeStep
from kvcache.kernels import layout

EXAMPLES = Path(__file__).parents[2] / "examples"
# float64: what batching and chunking change in the order of sums is about 1e-15
TOLERANCE = 1e-9


def _load(name: str) -> ModuleType:
    """Import an example by path, under the name by which the examples import each other."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


hybrid_model = _load("hybrid_model")
paged_attention = _load("paged_attention")
model_runner = _load("model_runner")
serve = _load("serve")

# calls that move pages or lengths
_CALLS = (
    *("admit", "extend", "step", "advance", "slide", "commit", "finish", "retract", "abort"),
    *("evict", "flush", "drop_namespace"),
)


class PoisonedCache:
    """A manager whose pages hold NaN from the moment they are free until somebody writes them again.

    After each call, by the free stacks: KV of all pages that became free. After `extend` and `step`: KV of
    the pages that rows were given, which may have been evicted in the same call. After `advance`: KV beyond
    the computed length. Always: page 0. Before each call: that nobody wrote to a free page.
    """

    def __init__(self, cache: KVCacheManager, kv: Any) -> None:
        self._cache, self._kv = cache, kv
        config = cache.config
        self._free = [np.zeros(n + 1, np.bool_) for n in (config.full_pages, config.swa_pages)]
        self._poison_free()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._cache, name)
        if name not in _CALLS:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self._assert_free_pages_untouched(name)
            held = -(-self._cache.rows.allocated_len // self._cache.config.page_size)
            result = value(*args, **kwargs)
            if name in ("extend", "step"):
                self._poison_new(self._cache.index(args[0]), held, self._cache.rows.allocated_len)
            if name == "advance":
                self._poison_beyond(self._cache.index(args[0]))
            self._poison_free()
            return result

        return call

    def _pools(self) -> list[torch.Tensor]:
        """[layers * 2, pages, P, values] of the Full and the SWA pool."""
        page_size = self._cache.config.page_size
        pools = (self._kv.full, self._kv.sliding)
        return [x.flatten(0, 1).flatten(2).unflatten(1, (-1, page_size)) for x in pools]

    def _poison_free(self) -> None:
        pools = self._cache.pools
        tops = pools.tops.tolist()
        for i, (kv, stack) in enumerate(
            zip(self._pools(), (pools.full_stack, pools.swa_stack), strict=True)
        ):
            free = np.zeros_like(self._free[i])
            free[stack[: tops[i]].numpy()] = True
            fresh = np.flatnonzero(free & ~self._free[i])
            kv[:, torch.from_numpy(np.append(fresh, 0))] = torch.nan
            self._free[i] = free

    def _poison_new(self, rows: np.ndarray, held: np.ndarray, allocated: np.ndarray) -> None:
        pools, page_size = self._cache.pools, self._cache.config.page_size
        full, swa = self._pools()
        for row in rows.tolist():
            end = -(-int(allocated[row]) // page_size)
            pages = pools.page_table[row, int(held[row]) : end].long()
            full[:, pages] = torch.nan
            if self._cache.config.has_swa:
                swa[:, pools.swa_map[pages].long()] = torch.nan

    def _poison_beyond(self, rows: np.ndarray) -> None:
        pools, page_size, lens = self._cache.pools, self._cache.config.page_size, self._cache.rows
        full, swa = (x.flatten(1, 2) for x in self._pools())
        for row in rows.tolist():
            at = torch.arange(int(lens.computed_len[row]), int(lens.allocated_len[row]))
            slots = pools.page_table[row, at // page_size].long() * page_size + at % page_size
            full[:, slots] = torch.nan
            if self._cache.config.has_swa:
                swa[:, self._cache.translate(slots)] = torch.nan

    def _assert_free_pages_untouched(self, name: str) -> None:
        for kv, free, pool in zip(self._pools(), self._free, ("Full", "SWA"), strict=True):
            if kv.numel():
                pages = torch.from_numpy(np.flatnonzero(free))
                assert kv[:2, pages].isnan().all(), f"before {name}: a free {pool} page was written"


class CapturedDecode(DecodeStep):
    """The decode step that a graph captures, under the same poison. Stands in for `cache.views` meanwhile."""

    def __init__(self, setting: Setting) -> None:
        names = ("page_table", "swa_page_table") if setting.config.has_swa else ("page_table",)
        super().__init__(setting.manager, names)
        self._setting = setting

    def before_forward(self) -> None:
        super().before_forward()
        manager = self._setting.manager
        self._setting.cache._poison_new(
            manager.index(self._given),
            -(-manager.rows.allocated_len // manager.config.page_size),
            manager.pools.row_state[layout.ALLOCATED].numpy(),
        )

    def decode(self, requests: list[Any]) -> None:
        """What `Engine.decode` does."""
        engine, cache = self._setting.engine, self._setting.cache
        self._given = np.array([r.row for r in requests], np.int64)
        cache._assert_free_pages_untouched("a captured decode step")
        with self.running(self._given):
            self.before_forward()
            cache.views = self
            ends = [len(r.tokens) for r in requests]
            engine.runner.forward(
                [model_runner.Chunk(r, end - 1, end) for r, end in zip(requests, ends, strict=True)]
            )
            del cache.views
            self.after_forward()
        self.check_error()
        cache._poison_free()

    def page_table(self, rows: np.ndarray, lens: Any = None) -> Any:
        view = self.views["page_table"]
        return type(view)(*(x[: rows.size] for x in view))

    def swa_page_table(self, rows: np.ndarray, lens: Any = None) -> Any:
        view = self.views["swa_page_table"]
        return type(view)(*(x[: rows.size] for x in view))


class Setting:
    """A model, a poisoned cache and an engine."""

    def __init__(
        self,
        config: CacheConfig,
        *,
        draft: bool = False,
        adapters: int = 1,
        pairs: int = 2,
        chunk: int = 16,
        propose: Callable[[Any], list[int]] | None = None,
    ) -> None:
        model_config = hybrid_model.ModelConfig(
            window=config.window, draft=draft, num_adapters=adapters, num_pairs=pairs
        )
        self.config = config
        self.model = hybrid_model.HybridModel(model_config)
        self.manager = KVCacheManager(config)
        kv = paged_attention.PagedKV(model_config, config)
        self.cache = PoisonedCache(self.manager, kv)
        self.engine = serve.Engine(self.model, self.cache, kv, chunk_tokens=chunk, propose=propose)
        self.requests: list[Any] = []
        # (name, got, expected): what a scenario found on the way, to compare beside the logits
        self.findings: list[tuple[str, Any, Any]] = []

    def found(self, name: str, got: Any, expected: Any) -> None:
        """Note a finding. It isn't asserted yet: a planted fault must get as far as the logits."""
        self.findings.append((name, got, expected))

    def submit(self, prompt: list[int], num_new: int = 1, **kwargs: Any) -> Any:
        """Queue a request and remember it for the comparison."""
        request = model_runner.Request(prompt, num_new, **kwargs)
        self.engine.submit(request)
        self.requests.append(request)
        return request

    def start(self, prompt: list[int], num_new: int = 1, **kwargs: Any) -> Any:
        """Queue a request and admit it, and nothing else."""
        assert not self.engine.waiting
        request = self.submit(prompt, num_new, **kwargs)
        self.engine.start(self.engine._look_up([request]), [0])
        return request

    def serve(self, prompt: list[int], num_new: int = 1, **kwargs: Any) -> Any:
        """Serve one request to its end."""
        request = self.submit(prompt, num_new, **kwargs)
        self.engine.run()
        return request

    def reused(self, request: Any) -> int:
        """Tokens that the request's first forward did not have to compute."""
        return request.trace[0][0]

    def assert_as_found(self) -> None:
        """Assert that all findings are as expected."""
        for name, got, expected in self.findings:
            assert got == expected, name

    def assert_exact(self) -> None:
        """Assert that each position's logits, each time they were computed, are those without a cache."""
        for i, request in enumerate(self.requests):
            dense = hybrid_model.dense_logits(self.model, request.tokens, request.adapter)
            for start, *computed in request.trace:
                for name, got, want in zip(("target", "draft"), computed, dense, strict=True):
                    if got is None:
                        continue
                    torch.testing.assert_close(
                        got,
                        want[start : start + len(got)],
                        rtol=0,
                        atol=TOLERANCE,
                        msg=lambda text, at=f"logits of request {i} ({name}) from {start}": (
                            f"{at} differ from the model without a cache\n{text}"
                        ),
                    )

    def assert_all_pages_come_back(self) -> None:
        """Flush, and assert that both pools are whole."""
        assert not self.engine.running
        self.cache.flush()
        self.manager.check()
        stats = self.manager.stats()
        assert stats.full_pages_free == self.config.full_pages
        assert stats.swa_pages_free == self.config.swa_pages
        assert stats.nodes == stats.tree_full_pages == 0
