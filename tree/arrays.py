"""The arrays of the tree: every field, its unit, its sentinel and its invariant, in one place.

Node arrays: `nodes[field, node]`, int32, `[NUM_FIELDS, num_records]`. Record 0 is the null node: it is no
node of the tree, it is the sentinel of both recency lists and the parent of every namespace root.

| field      | meaning                                          | sentinel, invariant                    |
| ---------- | ------------------------------------------------ | -------------------------------------- |
| PARENT     | node above; a root's is 0                        | spare record: next spare one, 0 = end  |
| START      | slot of the node's first page in the slab        | slots of two records never overlap     |
| PAGES      | pages of the edge                                | >= 1; 0 for a root                     |
| DEPTH      | pages above the node's first page                | = DEPTH + PAGES of its parent          |
| CHILDREN   | number of child nodes                            | 0 = leaf                               |
| CHILD      | XOR of the child nodes                           | so the only child where CHILDREN = 1   |
| FULL_LOCKS | locks whose path includes the node               | parent's >= child's; roots count too   |
| SWA_LOCKS  | locks whose trailing window includes the node    | <= FULL_LOCKS; SPARE, RUN, JOINED: no node |
| LIVE       | 1: every page has an SWA page; 0: tombstone      | 0 everywhere without an SWA pool       |
| FULL_PREV  | next more recent node of the Full recency list   | OUT = not in the list: locked, a root  |
| FULL_NEXT  | next less recent node                            | a node comes after its ancestors       |
| SWA_PREV   | next more recent node of the SWA recency list    | OUT = not in it: locked, tombstone     |
| SWA_NEXT   | next less recent node                            | of one event, shallower comes after    |
| HASH       | 32-bit hash of the first page (and of HEAD)      | a hint only: tokens decide             |
| GEN        | counts up when the record means something else   | (node, GEN) names one prefix for ever  |
| HEAD       | bigram keys: first token of the first unit       | used at DEPTH 0; -1 elsewhere          |
| CHANGED    | 1: the log of changes has the record (changes.py) | 0 everywhere while there is no log    |
| SPACE_PREV | previous node of the namespace, or its root      | a ring through the root; a node comes  |
| SPACE_NEXT | next node of the namespace, or its root          | after its ancestors                    |
| BIRTH      | counts up when the record is taken               | stays when a node loses its end        |
| WIN_REFS   | windows that cover the node                      | 0: a tombstone, or nothing keeps it    |
| WIN_PAGES  | pages of the window that ends with the node      | 0 = none; all below belong to a window |
| WIN_PLACE  | its place in the heap                            | 1 is the top; 0 = no window            |
| WIN_KEY    | what it is worth, as a time (value.py)           | the least goes first                   |
| WIN_BORN   | number of windows made before it                 | breaks ties: the older goes first      |
| WIN_LAST   | clock of its last use, or when it was made       | admissions                             |
| WIN_CLASS  | class of its checkpoint (value.py)               |                                        |
| WIN_MASK   | classes that it has inherited, bit c for class c |                                        |
| WIN_USES   | how often requests resumed there                 | 2 = twice or more                      |
| WIN_PRIORITY | of the request that made or used it        | the highest one                        |
| WIN_AWAITED | clock of the last match of a waiting request that would resume there, and 1 | 0 = none   |
| WIN_GAP    | mean admissions from use to use, 8 binary digits | 0 = unknown                            |
| WIN_PREV   | the window made before it; record 0 ends the ring |                                       |
| WIN_NEXT   | the window made after it                         |                                        |
| TAIL       | end of the last prompt through the node, pages   | 0 = unknown                            |
| ANSWER_TAIL | the same with its answer                        | 0 = unknown                            |
| HEAP       | `nodes[HEAP, i]`: the node of place i of the heap | of no node: an array of its own       |

A spare record has SWA_LOCKS = SPARE. A run of free slots uses a record too (SWA_LOCKS = RUN): START and
PAGES are the run, FULL_PREV and FULL_NEXT link runs of one size class. Nodes and runs cover disjoint slots,
so `slots + roots` records always suffice. A record whose node was joined with the one below has SWA_LOCKS =
JOINED until it is used again: CHILD is the node that has its pages now and HASH that node's BIRTH, DEPTH and
PAGES stay, so (node, GEN) of before still finds them (join.py); PARENT is the next such record.

Token slab: `tokens`, int32 `[slots * P]`. Slot s holds P units from s * P on: unit i of a plain key is token
i; of a bigram key it is token i + 1 (token i is unit i - 1's, or HEAD). Tokens are >= 0. The first and the
last word of a free run hold minus its record, so a freed neighbour is found without a table.

Child table: `table[slot, (TAG, NODE)]`, int32, open addressing with linear probing and backward-shift
deletion, on a level of a power of two of slots, at most half of them used. NODE = 0 means empty. Where half
are used, a level of twice the size takes over, and what is filed from then on brings some entries along
(children.py): look-ups go to both levels until the older one is empty. Two places hold the levels in turn.

Locks: `locks[field, lock]`, int32: LOCK_NODE (0 = free), LOCK_END (pages), LOCK_SWA (first page whose SWA is
locked; LOCK_END when the SWA part was released), LOCK_GEN, LOCK_LEARNS (1: where the request forks from what
the tree has is still to be learned, value.py), LOCK_PRIORITY (of the request).

Ranges: `ranges[i, (KIND, REQUEST, PAGE, SLOT, COUNT)]`, int32: what the device has to do, in the order in
which the tree decided it; see ranges.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]

NO_NODE = 0
OUT = -1
SPARE = -1
RUN = -2
JOINED = -3

(
    PARENT,
    START,
    PAGES,
    DEPTH,
    CHILDREN,
    CHILD,
    FULL_LOCKS,
    SWA_LOCKS,
    LIVE,
    FULL_PREV,
    FULL_NEXT,
    SWA_PREV,
    SWA_NEXT,
    HASH,
    GEN,
    HEAD,
    CHANGED,
    SPACE_PREV,
    SPACE_NEXT,
    BIRTH,
    WIN_REFS,
    WIN_PAGES,
    WIN_PLACE,
    WIN_KEY,
    WIN_BORN,
    WIN_LAST,
    WIN_CLASS,
    WIN_MASK,
    WIN_USES,
    WIN_PRIORITY,
    WIN_AWAITED,
    WIN_GAP,
    WIN_PREV,
    WIN_NEXT,
    TAIL,
    ANSWER_TAIL,
    HEAP,
) = range(37)
NUM_FIELDS = 37

TAG, NODE = 0, 1

LOCK_NODE, LOCK_END, LOCK_SWA, LOCK_GEN, LOCK_LEARNS, LOCK_PRIORITY = range(6)
NUM_LOCK_FIELDS = 6

# `meta`, int64 [M_TOKEN_KEYS + P + log]: scalars that compiled functions read and write, the words of the
# page hash, then the log of changes
(
    M_PAGE_SIZE,  # tokens per page
    M_KEEP_PAGES,  # pages of a window, 0 without an SWA pool
    M_BIGRAM,  # 1: unit i covers tokens i, i + 1
    M_NODES,  # nodes but roots
    M_BUMP,  # records ever used
    M_SPARE,  # first spare record, 0 = none
    M_JOINED,  # first and last record that was joined with the node below, oldest first
    M_JOINED_LAST,
    M_NUM_JOINED,  # records between the two; 0 = none
    M_SLAB_TOP,  # slots below it were used at least once
    M_SLAB_SIZE,  # slots
    M_TABLE_MASK,  # slots of the child table's level - 1
    M_TABLE_BASE,  # its first slot
    M_OLD_MASK,  # slots of the older level - 1; 0: nothing is left in it
    M_OLD_BASE,  # its first slot, or the next level's
    M_MOVED,  # slots at the front of the older level that are empty for good
    M_FULL_PAGES,  # pages that the tree owns
    M_SWA_PAGES,  # of them live
    M_FULL_LOCKED,  # pages of nodes with FULL_LOCKS > 0
    M_SWA_LOCKED,  # live pages of nodes with SWA_LOCKS > 0
    M_LOCKS_FREE,  # entries of the stack of free locks
    M_TOUCHES,  # matches whose recency waits for the next call that changes the tree
    M_LOG_ROOM,  # entries that the log of changes can hold, 0 = there is no log
    M_LOG_LEN,  # entries of the log
    M_LOG_LOST,  # 1: the log was full, so it does not tell all
    M_RUN_CLASSES,  # bit c set: a free run of 2^c .. 2^(c+1) - 1 slots exists
    M_LOG_AT,  # where the log begins
    M_BY_VALUE,  # 1: windows are kept and given up by what they are worth (value.py)
    M_CHUNKS,  # 1: the end of every insert keeps its window also then
    M_LADDER,  # tokens from the end of a prompt to the first rung (ladder.py); 0: there is no ladder
    M_LADDER_FACTOR,  # from rung to rung
    M_CLOCK,  # admissions
    M_WINDOWS,  # windows in the heap
    M_BORN,  # windows ever made
    M_HAND,  # node of the window whose key was computed anew last, going round
    M_EVICTED_KEY,  # key of the window that was given up last
    M_RUN_HEAD,  # first record of class 0; class c is at M_RUN_HEAD + c
) = range(37)
NUM_RUN_CLASSES = 31
NUM_WINDOW_CLASSES = 24
# how often requests came back to a window of each class, and how many were made; 16 binary digits
M_HIT = M_RUN_HEAD + NUM_RUN_CLASSES
M_MADE = M_HIT + NUM_WINDOW_CLASSES
(
    M_HASH_MULTIPLIER,  # odd, 64 bits; from here on: secrets of the page hash (hashing.py)
    M_HASH_ADDEND,  # 64 bits
    M_HEAD_KEY,  # 32 bits, as all that follow
    M_HEAD_FACTOR,  # odd
    M_ODD_FACTOR,  # odd; 0 where P is even
    M_TOKEN_KEYS,  # key of a page's first token; P of them
) = range(M_MADE + NUM_WINDOW_CLASSES, M_MADE + NUM_WINDOW_CLASSES + 6)


# words of the smallest memory page
_MEMORY_PAGE = 1024
# records and child-table slots whose memory is asked for beforehand; beyond them it comes piece by piece
_FIRST_RECORDS = 1 << 16
_FIRST_SLOTS = 1 << 20


def commit(words: Int32Array) -> Int32Array:
    """Touch zeroed memory [..., n], so that no call that uses it first has to wait for the system."""
    words[..., ::_MEMORY_PAGE] = 0
    words[..., -1] = 0
    return words


def node_arrays(num_records: int) -> Int32Array:
    """Return zeroed node arrays for records 0 .. `num_records` - 1."""
    # A stride of a multiple of 4 KiB would put all fields of a node into one cache set.
    columns = -(-num_records // 1024) * 1024 + 80
    nodes = np.zeros((NUM_FIELDS, columns), np.int32)
    commit(nodes[:, :_FIRST_RECORDS])
    nodes[SWA_LOCKS, NO_NODE] = SPARE
    return nodes


def token_slab(num_tokens: int) -> Int32Array:
    """Return a zeroed slab; all its memory is the process's from here on."""
    return commit(np.zeros(max(num_tokens, 1), np.int32))


def child_table(num_slots: int, first_level: int, meta: Int64Array) -> Int32Array:
    """Return an empty child table for as many nodes as there are slots in the slab, and set it up in `meta`.

    The last level has at least twice as many slots; the place of the level before it is behind it.
    """
    last = 1 << (2 * num_slots - 1).bit_length()
    first = min(first_level, last)
    places = [0, last] if first < last else [0]
    table = np.zeros((last + (last // 2 if first < last else 0), 2), np.int32)
    for place in places:
        commit(table[place : place + _FIRST_SLOTS].reshape(-1))
    is_behind = (last // first).bit_length() % 2 == 0
    meta[M_TABLE_MASK] = first - 1
    meta[M_TABLE_BASE] = last if is_behind else 0
    meta[M_OLD_BASE] = 0 if is_behind else last
    return table
