"""Planted bugs: one small change of the sources each, and the tests of which at least one must fail.

`make mutants` (tests/mutants/run.py) plants each in a copy of the sources and runs its tests there, with
numba's compiler off, so that a mutant costs seconds.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A bug: in `path` the text `old`, which occurs once, becomes `new`."""

    name: str
    path: str
    old: str
    new: str
    tests: str  # arguments of pytest


_FRONTIER = "tests/faults/test_frontier.py"
_OWNERSHIP = "tests/faults/test_ownership.py"
_EVICTION = "tests/faults/test_eviction_order.py"
_LOCKS = "tests/faults/test_locks.py"
_KEYS = "tests/faults/test_keys.py"
_STATEFUL = "tests/oracle/test_stateful.py"
_DEVICE_MATCH = "tests/device/test_device_match.py"
_DEVICE_KERNELS = "tests/interp/test_match_kernels.py"
_FITS = "tests/manager/test_admit_as_many.py"
_STREAMS = "tests/device/test_streams.py"
_EXACT = "tests/manager/test_exactness.py"
_RESEND = "tests/faults/test_resend.py"
_LATE = "tests/faults/test_late_calls.py"
_WALKS = "tests/faults/test_walks.py"
_RESET = "tests/manager/test_reset.py"
_BY_VALUE = "tests/faults/test_windows_by_value.py"
_SAME_ROWS = "tests/manager/test_same_rows.py"

MUTANTS = [
    # host rows
    Mutant(
        "frontier one page further",
        "kvcache/rows.py",
        "- keep, 0) // page_size * page_size",
        "- keep + page_size, 0) // page_size * page_size",
        f"{_FRONTIER} -k never_reaches",
    ),
    Mutant(
        "bigram keys counted as tokens",
        "kvcache/rows.py",
        "    return max(tokens - 1, 0) if bigram else tokens\n",
        "    return tokens\n",
        f"{_FRONTIER} -k never_reaches",
    ),
    Mutant(
        "the host's frontier stands still",
        "kvcache/rows.py",
        "        state[FRONTIER, r] = new\n",
        "        state[FRONTIER, r] = old\n",
        _FRONTIER,
    ),
    Mutant(
        "SWA of a prefix stays locked",
        "kvcache/rows.py",
        "if new >= owned and state[SWA_HELD, r] != 0:",
        "if new > owned + 10**6 and state[SWA_HELD, r] != 0:",
        f"{_LOCKS} -k released_early",
    ),
    Mutant(
        "own pages counted to the floor",
        "kvcache/rows.py",
        "end = (state[ALLOCATED, r] + page_size - 1) // page_size",
        "end = state[ALLOCATED, r] // page_size",
        f"{_OWNERSHIP} -k rejected_drafts",
    ),
    Mutant(
        "the host's frontier forgets the key that comes again",
        "kvcache/rows.py",
        "    last = resend_end(key_units(computed, bigram), page_size)\n",
        "    last = key_units(computed, bigram) // page_size * page_size\n",
        f"{_FRONTIER} -k never_reaches",
    ),
    Mutant(
        "a handle's generation is not compared",
        "kvcache/rows.py",
        "if r >= state.shape[1] or state[GENERATION, r] != handles[i] >> HANDLE_BITS:",
        "if r >= state.shape[1]:",
        f"{_LATE} -k late_call_of",
    ),
    Mutant(
        "a handle's generation is not counted up",
        "kvcache/rows.py",
        "= state[GENERATION, rows[i]] % _MOST_GENERATIONS + 1\n",
        "= state[GENERATION, rows[i]]\n",
        f"{_LATE} -k all_that_ever_ran",
    ),
    Mutant(
        "rows of a request that has ended are found again",
        "kvcache/rows.py",
        '            self._found, self._raw_handles = _NO_ROWS, b""\n',
        "            pass\n",
        _SAME_ROWS,
    ),
    Mutant(
        "a batch that was refused is found the next time",
        "kvcache/rows.py",
        "        if bad < 0:\n            self._found",
        "        if True:\n            self._found",
        _SAME_ROWS,
    ),
    Mutant(
        "index gives out the rows that later calls use",
        "kvcache/core.py",
        "return running_rows(self.rows, rows).copy()",
        "return running_rows(self.rows, rows)",
        _SAME_ROWS,
    ),
    Mutant(
        "reset keeps generations",
        "kvcache/rows.py",
        "        self.give_back(np.flatnonzero(self.active).astype(np.int32))\n        self._free[:]",
        "        self.state[:GENERATION] = 0\n        self.num_free = self._free.size\n        self._free[:]",
        f"{_RESET} -k handle_from_before",
    ),
    Mutant(
        "tokens that the key lacks are handed over",
        "kvcache/requests.py",
        "units = key_units(min(np.int64(state[COMPUTED, r]), lens[b]), bigram)",
        "units = key_units(np.int64(state[COMPUTED, r]), bigram)",
        "tests/faults/test_lag.py -k stop_token",
    ),
    # plan
    Mutant(
        "a dropped range frees no SWA",
        "kvcache/device/plan.py",
        "(r.DROP_ROW, layout.DROP_ROW, 0, 0, 1)",
        "(r.DROP_ROW, layout.DROP_ROW, 0, 0, 0)",
        _FRONTIER,
    ),
    Mutant(
        "rows repointed before their pages are read",
        "kvcache/device/plan.py",
        "(r.BIND, layout.BIND, 2, 0, 0)",
        "(r.BIND, layout.BIND, 0, 0, 0)",
        f"{_OWNERSHIP} -k computed_the_same",
    ),
    Mutant(
        "adopted pages are not freed",
        "kvcache/device/plan.py",
        "(r.ADOPT, layout.ADOPT, 1, 1, 0)",
        "(r.ADOPT, layout.ADOPT, 1, 0, 0)",
        f"{_OWNERSHIP} -k healed",
    ),
    # kernels, twins
    Mutant(
        "slide forgets the map",
        "kernels/slide.py",
        "            swa_map[full_page] = 0\n",
        "",
        f"{_FRONTIER} -k larger_than_the_window",
    ),
    Mutant(
        "slide's frontier forgets the key that comes again",
        "kernels/slide.py",
        "        last_end = max(0, units - 1) // page_size * page_size\n",
        "        last_end = units // page_size * page_size\n",
        "tests/kernels/test_kernels_slide.py -k key_that_ends",
    ),
    Mutant(
        "a decode step's frontier forgets the key that comes again",
        "kernels/decode_slide.py",
        "            last_end = max(0, units - 1) // page_size * page_size\n",
        "            last_end = units // page_size * page_size\n",
        "tests/kernels/test_kernels_decode.py -k 'slide_frees and 60-12-4 and tokens'",
    ),
    Mutant(
        "adoption leaves the old map entry",
        "kernels/apply.py",
        "= swa_map[cells[i]]\n                    swa_map[cells[i]] = 0\n",
        "= swa_map[cells[i]]\n",
        f"{_OWNERSHIP} -k healed",
    ),
    Mutant(
        "extend pops the same page twice",
        "kernels/extend.py",
        "popped = full_stack[full_top - first_pop - n : full_top - first_pop]",
        "popped = full_stack[full_top - n : full_top]",
        "tests/kernels/test_kernels_extend.py",
    ),
    # match on the device
    Mutant(
        "the device's window has to be a page longer",
        "kernels/match.py",
        "(pos - tombstone_end >= keep_pages)",
        "(pos - tombstone_end > keep_pages)",
        f"{_DEVICE_KERNELS} -k 'small_blocks and 1-0'",
    ),
    Mutant(
        "a compare forgets the first difference",
        "kernels/match.py",
        "compares = (same == limit) & (done * BLOCK < limit)",
        "compares = done * BLOCK < limit",
        f"{_DEVICE_KERNELS} -k 'small_blocks and 3-0'",
    ),
    Mutant(
        "a child of another node is taken",
        "kernels/match.py",
        "is_child = tl.load(record_ptr + RECORD_PARENT) == node",
        "is_child = tl.load(record_ptr + RECORD_PARENT) >= 0",
        f"{_DEVICE_KERNELS} -k equal_tags",
    ),
    Mutant(
        "a changed node is not noted again",
        "kvcache/device/tree_mirror.py",
        "            _write_record(nodes, n, node_rows[records])\n            nodes[a.CHANGED, n] = 0\n",
        "            _write_record(nodes, n, node_rows[records])\n",
        f"{_DEVICE_MATCH} -k 'same_results and page4'",
    ),
    Mutant(
        "pages once seen are not uploaded again",
        "kvcache/device/tree_mirror.py",
        "        seen_pages[page_ids[i]] = 0\n",
        "        pass\n",
        f"{_DEVICE_MATCH} -k 'same_results and page4'",
    ),
    # tree: match
    Mutant(
        "a window one page short is enough",
        "tree/match.py",
        "            if run >= keep:\n                best, best_node = pos, node",
        "            if run >= keep - 1:\n                best, best_node = pos, node",
        f"{_FRONTIER} -k tombstone_ends",
    ),
    Mutant(
        "the run goes on past a tombstone",
        "tree/match.py",
        "run = run + n if nodes[LIVE, node] != 0 else np.int64(0)",
        "run = run + n if nodes[LIVE, node] != 0 else run",
        f"{_FRONTIER} -k d22",
    ),
    Mutant(
        "hints climb from the wrong half",
        "tree/match.py",
        "    while nodes[PARENT, x] != 0 and nodes[DEPTH, x] >= pos:\n",
        "    while False:\n",
        "tests/manager/test_match_hints.py",
    ),
    Mutant(
        "a bigram key's first token is ignored",
        "tree/children.py",
        "if child == 0 or (at_top and nodes[HEAD, child] != head):",
        "if child == 0:",
        f"{_FRONTIER} -k first_token",
    ),
    # tree: insert
    Mutant(
        "the window of a checkpoint begins a page late",
        "tree/windows.py",
        "first = max(c - keep, owned)",
        "first = max(c - keep + 1, owned)",
        f"{_FRONTIER} -k whole_window",
    ),
    Mutant(
        "the branch is not kept",
        "tree/windows.py",
        "    fork = branch // page_size if branch >= 0 else -1\n",
        "    fork = -1\n",
        f"{_FRONTIER} -k fork",
    ),
    Mutant(
        "no window is kept for the key that comes again",
        "tree/windows.py",
        "        n = _keep_window(kept, n, resend, owned, end, frontier, keep)\n",
        "",
        f"{_RESEND} -k 'second_identical and 6-4-False'",
    ),
    Mutant(
        "no window is kept for the key that comes again, beside other checkpoints",
        "tree/windows.py",
        "    _mark(marks, resend, owned, end)\n",
        "",
        f"{_RESEND} -k beside_other_checkpoints",
    ),
    Mutant(
        "the last page of a prefix is not compared",
        "tree/insert.py",
        "covered = min(owned * page_size, requests[b, KEY_LEN] - bigram)",
        "covered = min((owned - 1) * page_size, requests[b, KEY_LEN] - bigram)",
        f"{_WALKS} -k contradicts_the_end",
    ),
    Mutant(
        "of a prefix nothing is compared",
        "tree/insert.py",
        "if whole else max(covered - 1, 0) // page_size * page_size\n",
        "if whole else max(covered - 1, 0) // page_size * page_size + page_size\n",
        f"{_WALKS} -k contradicts_the_end",
    ),
    Mutant(
        "a broken window is kept",
        "tree/windows.py",
        "or first < frontier:",
        "or first < 0:",
        _STATEFUL,
    ),
    Mutant(
        "duplicates are freed without their SWA",
        "tree/insert.py",
        "num = emit(ranges, num, FREE_ROW_SWA, b, cut, -1, end - cut)",
        "num = emit(ranges, num, FREE_ROW, b, cut, -1, end - cut)",
        f"{_OWNERSHIP} -k computed_the_same",
    ),
    Mutant(
        "a commit forgets to lock the new pages",
        "tree/insert.py",
        "        lock_full(nodes, meta, node, anchor)\n",
        "",
        f"{_OWNERSHIP} -k nothing_new",
    ),
    # tree: joins
    Mutant(
        "nodes of different recency are joined",
        "tree/join.py",
        "        and (nodes[FULL_PREV, lower] == upper or nodes[FULL_PREV, lower] == OUT)\n",
        "",
        f"{_WALKS} -k different_recency",
    ),
    Mutant(
        "nodes of different SWA recency are joined",
        "tree/join.py",
        "        and (nodes[SWA_PREV, upper] == lower or nodes[SWA_PREV, upper] == OUT)\n",
        "",
        f"{_WALKS} -k different_swa_recency",
    ),
    Mutant(
        "a joined node does not lead to its new owner",
        "tree/join.py",
        "    if nodes[SWA_LOCKS, x] == JOINED and nodes[GEN, x] == gen + 1:",
        "    if nodes[SWA_LOCKS, x] == JOINED and nodes[GEN, x] == gen - 1:",
        f"{_WALKS} -k node_it_ended_in",
    ),
    Mutant(
        "a joined node that lost the match's own pages still leads on",
        "tree/join.py",
        "or nodes[DEPTH, x] + nodes[PAGES, x] < end:",
        "or nodes[DEPTH, x] + nodes[PAGES, x] < 0:",
        f"{_WALKS} -k lost_one_of_its_pages",
    ),
    Mutant(
        "a record that was taken again is the old one",
        "tree/slab.py",
        "    nodes[BIRTH, n] += 1\n",
        "",
        f"{_WALKS} -k taken_again",
    ),
    # tree: edges, recency, slab
    Mutant(
        "a split loses liveness",
        "tree/edges.py",
        "    nodes[LIVE, upper] = nodes[LIVE, n]\n",
        "",
        f"{_LOCKS} -k pins",
    ),
    Mutant(
        "a split forgets locks",
        "tree/edges.py",
        "    nodes[FULL_LOCKS, upper] = nodes[FULL_LOCKS, n]\n",
        "",
        f"{_LOCKS} -k survive_splits",
    ),
    Mutant(
        "the upper half of a split is the older one",
        "tree/edges.py",
        "push_full(nodes, upper, nodes[FULL_PREV, n])",
        "push_full(nodes, upper, n)",
        f"{_EVICTION} -k partial_hit",
    ),
    Mutant(
        "deep SWA goes before shallow",
        "tree/recency.py",
        "            push_swa(nodes, x, after)\n            after = x\n",
        "            push_swa(nodes, x, 0)\n",
        f"{_EVICTION} -k deep_pages",
    ),
    Mutant(
        "freed slots are not joined to the left",
        "tree/slab.py",
        "        if left > 0:\n",
        "        if left > 10**9:\n",
        _STATEFUL,
    ),
    # tree: locks, eviction
    Mutant(
        "SWA is locked a page short",
        "tree/lock.py",
        "    first = max(end - meta[M_KEEP_PAGES], min(frontier, end), 0)\n",
        "    first = max(end - meta[M_KEEP_PAGES] + 1, min(frontier, end), 0)\n",
        _STATEFUL,
    ),
    Mutant(
        "unlocking refreshes nothing",
        "tree/lock.py",
        "            push_full(nodes, x, 0)\n",
        "            pass\n",
        _LOCKS,
    ),
    Mutant(
        "a receipt serves twice",
        "tree/lock.py",
        "        locks[LOCK_GEN, k] += 2\n",
        "",
        f"{_LOCKS} -k own_receipt",
    ),
    Mutant(
        "tombstone leaves survive",
        "tree/evict.py",
        "        and not _can_be_reused(nodes, keep, x)\n",
        "        and False\n",
        f"{_EVICTION} -k tombstone_leaf",
    ),
    Mutant(
        "a locked leaf is evicted with its window",
        "tree/evict.py",
        "if nodes[CHILDREN, x] > 0 or nodes[FULL_LOCKS, x] > 0:",
        "if nodes[CHILDREN, x] > 0:",
        f"{_OWNERSHIP} -k swa_is_gone",
    ),
    Mutant(
        "eviction takes the most recent",
        "tree/evict.py",
        "        x = np.int64(nodes[SWA_PREV, NO_NODE])\n",
        "        x = np.int64(nodes[SWA_NEXT, NO_NODE])\n",
        f"{_EVICTION} -k recent",
    ),
    # reset, broken
    Mutant(
        "reset leaves the map",
        "kvcache/device/pools.py",
        "(self.page_table, self.slab, self.swa_map, self.row_state, self.error)",
        "(self.page_table, self.slab, self.row_state, self.error)",
        f"{_RESET} -k 'ends_all_rows and cpu'",
    ),
    Mutant(
        "a body that raised breaks nothing",
        "kvcache/device/decode_step.py",
        'cache.broken = "the body of DecodeStep.running raised, and may have run half a step"',
        "pass",
        f"{_RESET} -k body_that_failed",
    ),
    # manager
    Mutant(
        "a refused extend has evicted already",
        "kvcache/state.py",
        "            if need > evictable:\n",
        "            if need > evictable and tree.evict(1, 1)[1] < 0:\n",
        f"{_EXACT} -k lack_of_pages",
    ),
    Mutant(
        "extend evicts for Full only",
        "kvcache/state.py",
        "tree.evict(max(full, 0), max(swa, 0))",
        "tree.evict(max(full, 0), 0)",
        f"{_OWNERSHIP} -k lack_of_swa",
    ),
    Mutant(
        "a stale match is admitted",
        "kvcache/manager.py",
        "        stale = self.tree.still_holds(batch.results, chosen, batch.namespaces)\n",
        "        stale = -1\n",
        _STATEFUL,
    ),
    Mutant(
        "a namespace's handle outlives it",
        "tree/roots.py",
        "        if not is_root(nodes, handles[i]):\n",
        "        if not is_root(nodes, handles[i]) and nodes[SWA_LOCKS, handles[i] & 0xFFFFFFFF] < 0:\n",
        f"{_KEYS} -k dropped_namespace",
    ),
    Mutant(
        "what was not moved yet is not found in a child table that grows",
        "tree/children.py",
        "            if old == 0 or mask == old:\n",
        "            if old >= 0:\n",
        "tests/device/test_device_match.py -k table_that_grows",
    ),
    # what fits
    Mutant(
        "what is locked already is locked again",
        "tree/fits.py",
        "if known > 0 or -known >= pages:",
        "if -known >= pages:",
        f"{_FITS} -k running_request",
    ),
    Mutant(
        "windows that overlap count twice",
        "tree/fits.py",
        "more += marked[s] != mark",
        "more += 1",
        f"{_FITS} -k window",
    ),
    # device and stream
    Mutant(
        "any device will do",
        "kvcache/device/stream.py",
        "if device != self._device.index:",
        "if device < 0:",
        _STREAMS,
    ),
    Mutant(
        "any stream will do where a graph may be captured",
        "kvcache/device/stream.py",
        "if captured and is_capturing():",
        "if captured:",
        _STREAMS,
    ),
    # windows by value
    Mutant(
        "a window's chance of a return is ignored",
        "tree/value.py",
        "log2_fixed(max(chance_of(nodes, meta, n), 1))",
        "log2_fixed(1)",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "all classes are equally likely",
        "tree/value.py",
        "    return ((meta[M_HIT + c] + (_ONE >> 1)) << 16) // (meta[M_MADE + c] + _ONE)",
        "    return ((meta[M_HIT] + (_ONE >> 1)) << 16) // (meta[M_MADE] + _ONE)",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "what is lost is counted from the beginning",
        "tree/value.py",
        "    above = np.int64(nodes[DEPTH, f] + nodes[PAGES, f]) if f != 0 else np.int64(0)\n",
        "    above = np.int64(0)\n",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "pages that other windows keep count as freed",
        "tree/value.py",
        "        if nodes[WIN_REFS, x] == 1 and nodes[SWA_LOCKS, x] == 0:\n",
        "        if nodes[SWA_LOCKS, x] == 0:\n",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "a locked window goes like any other",
        "tree/value.py",
        "    return key + LOCKED_KEY if nodes[SWA_LOCKS, n] > 0 else key\n",
        "    return key\n",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "nothing is ever forgotten",
        "tree/value.py",
        "            meta[M_MADE + c] = meta[M_MADE + c] * 9 // 10\n",
        "            pass\n",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "a use does not make a window recent",
        "tree/value.py",
        "        nodes[WIN_LAST, node] = now\n        rekey(nodes, meta, node)\n    refresh",
        "        rekey(nodes, meta, node)\n    refresh",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "a fork is learned as if it were at the prompt's end",
        "tree/value.py",
        "    if tail > hit:\n",
        "    if tail > hit + 1000:\n",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "stale keys are not computed anew",
        "tree/value.py",
        "    refresh(nodes, meta, _REFRESHED)\n    return learns\n",
        "    return learns\n",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "classes of a window that goes are lost",
        "tree/kept.py",
        "            nodes[WIN_MASK, f] |= nodes[WIN_MASK, n] | (1 << nodes[WIN_CLASS, n])\n",
        "            pass\n",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "useless rungs are made all the same",
        "tree/kept.py",
        "now > _LEARNED_AFTER and nodes",
        "now > 10**9 and nodes",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "a window is made over a tombstone",
        "tree/kept.py",
        "        if nodes[LIVE, x] == 0:\n            return False\n",
        "        if nodes[LIVE, x] == 2:\n            return False\n",
        f"{_BY_VALUE} -k freed_keeps",
    ),
    Mutant(
        "a split forgets the windows",
        "tree/edges.py",
        "        nodes[WIN_REFS, upper] = nodes[WIN_REFS, n]\n",
        "",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "nodes of different windows are joined",
        "tree/join.py",
        "        and nodes[WIN_REFS, upper] == nodes[WIN_REFS, lower]\n",
        "",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "the heap loses its order going down",
        "tree/heap.py",
        "        if not _before(nodes, nodes[HEAP, child], n):\n            break\n",
        "        break\n",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "rungs stand at equal distances",
        "tree/ladder.py",
        "            reach *= meta[M_LADDER_FACTOR]\n",
        "            reach += first_rung(meta)\n",
        f"{_BY_VALUE} -k rungs",
    ),
    Mutant(
        "the ends of chunks keep windows by value",
        "tree/ladder.py",
        "    if ends or meta[M_BY_VALUE] == 0:\n",
        "    if True:\n",
        f"{_BY_VALUE} -k ends_of_chunks",
    ),
    Mutant(
        "a prompt's end keeps no window",
        "tree/ladder.py",
        "        _mark(marks, prompt // page_size, owned, end, PROMPT)\n",
        "        pass\n",
        f"{_BY_VALUE} -k victims",
    ),
    Mutant(
        "Full evicts a page and leaves its window",
        "tree/evict.py",
        "        drop_window(nodes, meta, n, False)\n",
        "        pass\n",
        f"{_BY_VALUE} -k victims",
    ),
]
