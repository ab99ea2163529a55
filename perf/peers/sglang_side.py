"""SGLang 0.5.20 as a Side: its UnifiedRadixCache with the Python or the Rust tree core, on a CPU.

All that is timed is the installed wheel's own code: match_prefix, inc_lock_ref, cache_unfinished_req,
cache_finished_req, evict, free_swa_out_of_window_slots and the allocation functions that its scheduler calls.
What stands here is the loop over the requests of a batch, which its scheduler writes too, and a request with
the attributes that these functions read.
"""

from __future__ import annotations

import logging
import os
import warnings
from array import array
from typing import Any

import numpy as np
import stub_torchvision
import torch
from side import Ints, Match, SideConfig, Tokens

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")
stub_torchvision.install()

from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: E402
from sglang.srt.mem_cache import allocation, common  # noqa: E402
from sglang.srt.mem_cache.allocator import paged  # noqa: E402
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    DecLockRefParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402


class _ExtendOnCpu:
    """`alloc_extend_kernel[grid](...)` without Triton: the wheel's own torch version."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._run

    @staticmethod
    def _run(
        prefix_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        free_pages: torch.Tensor,
        out: torch.Tensor,
        bs_upper: int,
        page_size: int,
    ) -> None:
        paged.alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, page_size, "cpu")


class _DecodeOnCpu(_ExtendOnCpu):
    """`alloc_decode_kernel[grid](...)`: an extend by one token."""

    @staticmethod
    def _run(  # type: ignore[override]
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        free_pages: torch.Tensor,
        out: torch.Tensor,
        bs_upper: int,
        page_size: int,
    ) -> None:
        paged.alloc_extend_naive(
            seq_lens - 1, seq_lens, last_loc, free_pages, out, page_size, "cpu"
        )


paged.alloc_extend_kernel = _ExtendOnCpu()
paged.alloc_decode_kernel = _DecodeOnCpu()


class _NoBuffers(SWAKVPool):
    """Both pools without a byte of KV: only the map is used."""

    def __init__(self) -> None:
        self.full_kv_pool = None
        self.swa_kv_pool = None
        self.full_to_swa_index_mapping = None


class _Request:
    """The attributes of SGLang's Req that the cache reads."""

    def __init__(self, tokens: array[int], prompt_len: int) -> None:
        self.rid = "r"
        self.tokens = tokens
        self.prompt_len = prompt_len
        self.origin_input_ids = tokens
        self.output_ids = array("q")
        self.computed = 0
        self.kv = ReqKvInfo()
        self.prefix_indices = torch.empty(0, dtype=torch.int64)
        self.last_node: Any = None
        self.lock_receipt = DecLockRefParams()
        self.swa_prefix_lock_released = False
        self.swa_branching_seqlen: int | None = None
        self.full_hit = 0
        self.session = None
        self.session_id = None
        self.extra_key = None
        self.cache_salt = None
        self.kv_rotation_base = None
        self.finished_reason = None

    def get_fill_ids(self) -> array[int]:
        return self.tokens[: self.computed]


class SGLangSide:
    """UnifiedRadixCache with components FULL and SWA.

    Args:
        core: "python" or "rust".
    """

    batched = False

    def __init__(self, config: SideConfig, core: str) -> None:
        self.name = f"SGLang {core.capitalize()}"
        self.config = config
        self.rows = ReqToTokenPool(config.max_running, config.max_len, "cpu", False)
        self.allocator = SWATokenToKVPoolAllocator(
            config.full_tokens,
            config.swa_tokens,
            config.page_size,
            torch.float16,
            "cpu",
            _NoBuffers(),
            need_sort=False,
        )
        os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = core
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=config.page_size,
                sliding_window_size=config.window,
                tree_components=(ComponentType.FULL, ComponentType.SWA),
            )
        )
        self.requests: list[_Request] = [_Request(array("q"), 0)] * config.max_requests

    def load(self, ids: Ints, tokens: Tokens, lens: Ints) -> None:
        wide = tokens.astype(np.int64)
        for i, row, n in zip(ids.tolist(), wide, lens.tolist(), strict=True):
            self.requests[i] = _Request(array("q", row.tobytes()), n)

    def set_lens(self, ids: Ints, lens: Ints) -> None:
        for i, n in zip(ids.tolist(), lens.tolist(), strict=True):
            self.requests[i].prompt_len = n

    def fill(self, ids: Ints, group: int) -> None:
        for first in range(0, ids.size, group):
            self._fill(ids[first : first + group])

    def _fill(self, ids: Ints) -> None:
        page_size, window = self.config.page_size, self.config.window
        self.match(ids)
        requests = self._of(ids)
        old = [len(r.prefix_indices) for r in requests]
        new = [
            max(r.prompt_len // page_size * page_size, n)
            for r, n in zip(requests, old, strict=True)
        ]
        slots = self._allocate(requests, old, new)
        at = 0
        for i, req, a, b in zip(ids.tolist(), requests, old, new, strict=True):
            own = slots[at : at + b - a]
            at += b - a
            dead = max(b - window, 0) // page_size * page_size
            if dead > a:
                self.allocator.free_swa_segment(own[: dead - a], start_pos=a)
            self.cache.insert(
                InsertParams(
                    key=RadixKey(req.tokens[:b]),
                    value=torch.cat([req.prefix_indices, own]),
                    prev_prefix_len=a,
                    swa_evicted_seqlen=max(dead, a),
                )
            )
            self.requests[i] = _Request(req.tokens, req.prompt_len)

    def _of(self, ids: Ints) -> list[_Request]:
        return [self.requests[i] for i in ids.tolist()]

    def match(self, ids: Ints) -> None:
        match_prefix = self.cache.match_prefix
        for req in self._of(ids):
            key = RadixKey(req.tokens, limit=req.prompt_len - 1)
            result = match_prefix(MatchPrefixParams(key=key, req=req))
            req.prefix_indices = result.device_indices
            req.last_node = result.last_device_node
            req.swa_branching_seqlen = result.swa_branching_seqlen
            req.full_hit = result.full_kv_hit_length
            req.kv.cache_protected_len = len(result.device_indices)

    rematch = match  # it has no hints

    def matched(self, ids: Ints) -> Match:
        requests = self._of(ids)
        return Match(
            np.array([r.full_hit for r in requests], np.int64),
            np.array([len(r.prefix_indices) for r in requests], np.int64),
            np.array(
                [
                    -1 if r.swa_branching_seqlen is None else r.swa_branching_seqlen
                    for r in requests
                ],
                np.int64,
            ),
        )

    def admit(self, ids: Ints) -> None:
        requests = self._of(ids)
        for req in requests:
            req.lock_receipt = self.cache.inc_lock_ref(req.last_node).to_dec_params()
        self.rows.alloc(requests)
        for req in requests:
            n = len(req.prefix_indices)
            self.rows.write((req.kv.req_pool_idx, slice(0, n)), req.prefix_indices)
            req.computed = n
            req.kv.kv_allocated_len = n

    def drop(self, ids: Ints) -> None:
        for req in self._of(ids):
            self.cache.dec_lock_ref(req.last_node, req.lock_receipt)
            self._end(req)

    def _end(self, req: _Request) -> None:
        self.rows.free(req)
        req.kv.mark_kv_released()

    def _allocate(self, requests: list[_Request], old: list[int], new: list[int]) -> torch.Tensor:
        """Return token slots for [old, new) of each request, one after the other."""
        total = sum(new) - sum(old)
        if self.config.page_size == 1:
            return allocation.alloc_token_slots(self.cache, total)
        table = self.rows.req_to_token
        last = []
        for req, n in zip(requests, old, strict=True):
            if n == 0:
                last.append(torch.full((1,), -1))
            elif n == len(req.prefix_indices):
                last.append(req.prefix_indices[-1:])
            else:
                last.append(table[req.kv.req_pool_idx, n - 1 : n].long())
        prefix, seq = torch.tensor(old), torch.tensor(new)
        return allocation.alloc_paged_token_slots_extend(
            self.cache, prefix, prefix, seq, seq, torch.cat(last), total
        )

    def extend(self, ids: Ints, lens: Ints) -> None:
        requests = self._of(ids)
        new = lens.tolist()
        old = [r.computed for r in requests]
        out = self._allocate(requests, old, new)
        at = 0
        for req, a, b in zip(requests, old, new, strict=True):
            self.rows.write((req.kv.req_pool_idx, slice(a, b)), out[at : at + b - a])
            at += b - a
            req.computed = req.kv.kv_allocated_len = req.kv.kv_committed_len = b

    def step(self, ids: Ints) -> None:
        requests = self._of(ids)
        lens = torch.tensor([r.computed for r in requests], dtype=torch.int64)
        rows = torch.tensor([r.kv.req_pool_idx for r in requests], dtype=torch.int64)
        if self.config.page_size == 1:
            out = allocation.alloc_token_slots(self.cache, len(requests))
        else:
            last = self.rows.req_to_token[rows, lens - 1]
            out = allocation.alloc_paged_token_slots_decode(self.cache, lens + 1, lens + 1, last)
        self.rows.write((rows, lens), out.to(torch.int32))
        for req in requests:
            req.computed += 1
            req.kv.kv_allocated_len += 1
            req.kv.kv_committed_len += 1

    def commit(self, ids: Ints) -> None:
        for req in self._of(ids):
            self.cache.cache_unfinished_req(req)

    def slide(self, ids: Ints) -> None:
        self._free_out_of_window(self._of(ids))

    def tick(self, ids: Ints) -> None:
        # ScheduleBatch.maybe_evict_swa: a request's turn comes once a whole interval fell out
        least = self.config.window + max(1, envs.SGLANG_SWA_EVICTION_INTERVAL.get())
        self._free_out_of_window(
            [r for r in self._of(ids) if r.computed >= r.kv.swa_evicted_seqlen + least]
        )

    def _free_out_of_window(self, requests: list[_Request]) -> None:
        config = self.config
        self.allocator.free_group_begin()
        for req in requests:
            common.free_swa_out_of_window_slots(
                req,
                req.computed,
                sliding_window_size=config.window,
                page_size=config.page_size,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                retain_floor=self.cache.swa_retain_floor(req),
            )
        self.allocator.free_group_end()

    def finish(self, ids: Ints) -> None:
        for req in self._of(ids):
            self.cache.cache_finished_req(req, kv_len_to_handle=req.computed)
            self._end(req)

    def evict(self, full_tokens: int, swa_tokens: int) -> tuple[int, int]:
        result = self.cache.evict(EvictParams(num_tokens=full_tokens, swa_num_tokens=swa_tokens))
        return result.num_tokens_evicted, result.swa_num_tokens_evicted

    def free_tokens(self) -> tuple[int, int]:
        return self.allocator.full_available_size(), self.allocator.swa_available_size()

    def memory(self) -> dict[str, int]:
        return {}
