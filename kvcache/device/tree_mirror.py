"""TreeMirror: the tree's copy on the device, brought up to date by one upload of what changed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvcache.allocation import zeros
from kvcache.compiled import compiled
from kvcache.device import staging as staging_module
from kvcache.device.data_plane import DataPlane
from kvcache.kernels import layout
from kvcache.kernels.layout import ENTRY_FIELDS, RECORD_FIELDS
from kvcache.kernels.update_mirror import update_mirror, update_mirror_twin
from kvcache.rows import Int32Array, Int64Array
from kvcache.tree import arrays as a
from kvcache.tree.changes import NODE_CHANGED, SLOT_CHANGED
from kvcache.tree.radix_tree import RadixTree
from kvcache.tree.tokens import copy_tokens
from kvcache.uncopied import Uncopied

Bytes = npt.NDArray[np.uint8]

# entries of the log of changes; when more than that changed between two uses, the copy is made anew
_LOG_ROOM = 1 << 16
# words that an upload of changes may take before a whole copy is the better way
_MOST_WORDS = 1 << 20


class PlacedKeys(NamedTuple):
    """Where the keys of a match begin and below which root, on the device; on the CPU numpy arrays."""

    starts: Any  # [batch] int64, first token
    lens: Any  # [batch] int32, tokens
    roots: Any  # [batch] int32, node


@compiled
def _write_record(nodes: Int32Array, n: int, row: Int32Array) -> None:
    row[layout.RECORD_PARENT] = nodes[a.PARENT, n]
    row[layout.RECORD_START] = nodes[a.START, n]
    row[layout.RECORD_PAGES] = nodes[a.PAGES, n]
    row[layout.RECORD_DEPTH] = nodes[a.DEPTH, n]
    row[layout.RECORD_LIVE] = nodes[a.LIVE, n]
    row[layout.RECORD_GEN] = nodes[a.GEN, n]
    row[layout.RECORD_HEAD] = nodes[a.HEAD, n]
    row[layout.RECORD_FIELDS - 1] = 0  # padding


@compiled
def write_records(nodes: Int32Array, meta: Int64Array, rows: Int32Array) -> None:
    """Write records [0, len(rows)) as the device has them, and forget what the log says of records."""
    for n in range(rows.shape[0]):
        _write_record(nodes, n, rows[n])
        nodes[a.CHANGED, n] = 0


@compiled
def count_changes(meta: Int64Array) -> tuple[int, int, int]:
    """Return (records, child-table slots, pages of tokens) in the log; the last two may come twice."""
    records = 0
    slots = 0
    pages = 0
    log = meta[a.M_LOG_AT]
    for i in range(meta[a.M_LOG_LEN]):
        entry = meta[log + i]
        kind = entry & 3
        if kind == NODE_CHANGED:
            records += 1
        elif kind == SLOT_CHANGED:
            slots += 1
        else:
            pages += entry >> 34
    return records, slots, pages


@compiled
def take_changes(
    nodes: Int32Array,
    meta: Int64Array,
    table: Int32Array,
    tokens: Int32Array,
    node_ids: Int32Array,
    node_rows: Int32Array,
    slot_ids: Int32Array,
    slot_rows: Int32Array,
    page_ids: Int32Array,
    page_rows: Int32Array,
    seen_slots: Bytes,
    seen_pages: Bytes,
) -> tuple[int, int, int]:
    """Write what the log says as the device needs it (kernels/update_mirror.py), and empty the log.

    Returns:
        (records, child-table slots, pages of tokens) written, each once. `seen_slots` and `seen_pages` are
        scratch, all 0 before and after.
    """
    page_size = meta[a.M_PAGE_SIZE]
    records = 0
    slots = 0
    pages = 0
    log = meta[a.M_LOG_AT]
    for i in range(meta[a.M_LOG_LEN]):
        entry = meta[log + i]
        kind = entry & 3
        if kind == NODE_CHANGED:
            n = entry >> 2
            node_ids[records] = n
            _write_record(nodes, n, node_rows[records])
            nodes[a.CHANGED, n] = 0
            records += 1
        elif kind == SLOT_CHANGED:
            slot = entry >> 2
            if seen_slots[slot] == 0:
                seen_slots[slot] = 1
                slot_ids[slots] = slot
                slot_rows[slots, layout.ENTRY_TAG] = table[slot, a.TAG]
                slot_rows[slots, layout.ENTRY_NODE] = table[slot, a.NODE]
                slots += 1
        else:
            start = (entry >> 2) & 0xFFFFFFFF
            for page in range(start, start + (entry >> 34)):
                if seen_pages[page] == 0:
                    seen_pages[page] = 1
                    page_ids[pages] = page
                    # an assignment of slices would take a second to compile, for its error messages
                    copy_tokens(page_rows[pages], 0, tokens, page * page_size, page_size)
                    pages += 1
    for i in range(slots):
        seen_slots[slot_ids[i]] = 0
    for i in range(pages):
        seen_pages[page_ids[i]] = 0
    meta[a.M_LOG_LEN] = 0
    return records, slots, pages


class TreeMirror(Uncopied):
    """Records, child table and tokens of the tree in device memory, for matches on the device.

    Made at the first of them; from then on the tree keeps a log of its changes. `update` uploads what the
    log says, together with the keys of a match, in one copy, and one launch puts it in place. Nothing waits:
    whoever reads the copy was launched before or after it on the same stream.

    Attributes:
        records: [num_records, 8] int32, fields as in kernels/layout.py.
        table: [slots, 2] int32, the child table.
        tokens: [slab_slots * page_size] int32.
        hash_words: [5 + page_size] int64, secrets of the page hash.
    """

    def __init__(self, tree: RadixTree, plane: DataPlane) -> None:
        self._tree = tree
        self._plane = plane
        self.records = self._zeros(tree.nodes.shape[1], RECORD_FIELDS)
        self.table = self._zeros(*tree.table.shape)
        self._seen_slots: Bytes = np.zeros(len(tree.table), np.uint8)
        self._seen_pages: Bytes = np.zeros(plane.config.full_pages, np.uint8)
        self.tokens = self._zeros(tree.tokens.shape[0])
        words = tree.hash_words
        self.hash_words = self._zeros(2 * words.size).view(torch.int64)
        self._upload_array(self.hash_words.view(torch.int32), words.view(np.int32))
        tree.log_changes(_LOG_ROOM)
        tree.meta[a.M_LOG_LOST] = 1
        self._host: dict[str, Any] | None = None
        if plane.host is not None:
            self._host = {n: getattr(self, n).numpy() for n in ("records", "table", "tokens")}

    def _zeros(self, *shape: int) -> torch.Tensor:
        return zeros(shape, torch.int32, self._plane.pools.tops.device)

    @property
    def nbytes(self) -> int:
        """Device bytes held."""
        held = (self.records, self.table, self.tokens, self.hash_words)
        return sum(x.numel() * x.element_size() for x in held)

    @property
    def levels(self) -> tuple[int, int, int, int]:
        """Where the child table has entries: mask and first slot of its level, then of the older one."""
        meta = self._tree.meta
        places = (a.M_TABLE_MASK, a.M_TABLE_BASE, a.M_OLD_MASK, a.M_OLD_BASE)
        mask, base, old_mask, old_base = (meta.item(place) for place in places)
        return mask, base, old_mask, old_base

    # -- everything anew -------------------------------------------------------------------------------------

    def _upload_array(self, target: torch.Tensor, values: Int32Array) -> None:
        """Start the copy of a whole array into the front of `target`. Does not wait."""
        words = values.size
        host = (
            torch.empty(words, dtype=torch.int32)
            if target.is_cpu
            # freed pinned memory is not given out again before copies out of it are done
            else staging_module.pinned_empty(words)
        )
        host.numpy()[:] = values.reshape(-1)
        target.view(-1)[:words].copy_(host, non_blocking=True)
        self._plane.staging.count(words)

    def _upload_all(self) -> None:
        tree = self._tree
        rows = np.empty((int(tree.meta[a.M_BUMP]), RECORD_FIELDS), np.int32)
        write_records(tree.nodes, tree.meta, rows)
        self._upload_array(self.records, rows)
        self._upload_array(self.table, tree.table)
        used = int(tree.meta[a.M_SLAB_TOP] * tree.meta[a.M_PAGE_SIZE])
        if used:
            self._upload_array(self.tokens, tree.tokens[:used])
        tree.meta[a.M_LOG_LEN] = 0
        tree.meta[a.M_LOG_LOST] = 0

    # -- what changed ----------------------------------------------------------------------------------------

    def update(self, starts: Int64Array, lens: Int32Array, roots: Int64Array) -> PlacedKeys:
        """Bring the copy up to date and place the keys of a match; one upload, and one launch if need be.

        Where more changed than the log holds, whole arrays are uploaded.
        """
        tree, page_size = self._tree, self._plane.config.page_size
        num_nodes, num_slots, num_pages = (int(x) for x in count_changes(tree.meta))
        words = num_nodes * (1 + RECORD_FIELDS) + num_slots * (1 + ENTRY_FIELDS)
        words += num_pages * (1 + page_size)
        if tree.meta[a.M_LOG_LOST] or words > _MOST_WORDS:
            self._upload_all()
            num_nodes = num_slots = num_pages = 0
        staging = self._plane.staging
        staging.begin()
        shapes = (
            (num_nodes,),
            (num_nodes, RECORD_FIELDS),
            (num_slots,),
            (num_slots, ENTRY_FIELDS),
            (num_pages,),
            (num_pages, page_size),
        )
        places = [staging.part(int(np.prod(shape))) for shape in shapes]
        batch = starts.size
        key_places = staging.part(2 * batch), staging.part(batch), staging.part(batch)
        arrays: list[Any] = [
            staging.host_part(w).reshape(s) for w, s in zip(places, shapes, strict=True)
        ]
        node_ids, node_rows, slot_ids, slot_rows, page_ids, page_rows = arrays
        num_nodes, num_slots, num_pages = take_changes(
            tree.nodes,
            tree.meta,
            tree.table,
            tree.tokens,
            node_ids,
            node_rows,
            slot_ids,
            slot_rows,
            page_ids,
            page_rows,
            self._seen_slots,
            self._seen_pages,
        )
        host_keys = PlacedKeys(
            staging.host_part(key_places[0]).view(np.int64),
            staging.host_part(key_places[1]),
            staging.host_part(key_places[2]),
        )
        for to, values in zip(host_keys, (starts, lens, roots), strict=True):
            to[:] = values
        staging.upload()
        if num_nodes or num_slots or num_pages:
            self._plane.launches += 1
            if self._host is not None:
                update_mirror_twin(
                    node_ids,
                    node_rows,
                    slot_ids,
                    slot_rows,
                    page_ids,
                    page_rows,
                    self._host["records"],
                    self._host["table"],
                    self._host["tokens"],
                    num_nodes,
                    num_slots,
                    num_pages,
                    page_size,
                )
            else:
                parts: list[Any] = [
                    staging.device_part(w).view(s) for w, s in zip(places, shapes, strict=True)
                ]
                node_ids, node_rows, slot_ids, slot_rows, page_ids, page_rows = parts
                update_mirror(
                    node_ids,
                    node_rows,
                    slot_ids,
                    slot_rows,
                    page_ids,
                    page_rows,
                    self.records,
                    self.table,
                    self.tokens,
                    num_nodes=num_nodes,
                    num_slots=num_slots,
                    num_pages=num_pages,
                    page_size=page_size,
                )
        if self._host is not None:
            return host_keys
        starts_part, lens_part, roots_part = (staging.device_part(w) for w in key_places)
        return PlacedKeys(starts_part.view(torch.int64), lens_part, roots_part)
