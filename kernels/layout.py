"""Numbers that host plan and device kernels agree on: state fields, descriptor fields, op codes.

All are plain ints. Kernels, twins and the plan builder import them from here; none is written out
elsewhere.
"""

# row_state [4, max_rows] int32: lengths of each request row, in tokens
COMPUTED = 0  # KV written
ALLOCATED = 1  # pages held for
OWNED = 2  # prefix owned by the tree; page-aligned
FRONTIER = 3  # SWA of the row's own pages below it is freed; page-aligned
ROW_FIELDS = 4

# tops [2] int32: number of free entries of each pool's stack
FULL = 0
SWA = 1
NUM_POOLS = 2

# error [2] int32: what stopped a captured decode step, and in which row; nobody clears it
ERROR_CODE = 0
ERROR_ROW = 1
ERROR_FIELDS = 2
NO_ERROR = 0
NO_PAGE = 1  # a row begins a page and a free stack is empty
ROW_FULL = 2  # a row's next page is beyond the width of the page table
STACK_FULL = 3  # more SWA pages come back than the free stack holds

# extend: desc [5, capacity] int32, one column per row
EXTEND_ROW = 0
EXTEND_FIRST_PAGE = 1  # index in the row's page table of the first page to write
EXTEND_NUM_PAGES = 2
EXTEND_OFFSET = 3  # exclusive prefix sum of EXTEND_NUM_PAGES
EXTEND_NEW_ALLOCATED = 4  # tokens
EXTEND_FIELDS = 5

# apply: desc [7, capacity] int32, one column per page range
APPLY_OP = 0
APPLY_N = 1  # pages in the range
APPLY_ROW = 2
APPLY_PAGE = 3  # index in the row's page table of the first page
APPLY_SLOT = 4  # index in the slab of the first page
APPLY_FULL_POS = 5  # index in full_stack of the first push
APPLY_SWA_POS = 6  # index in swa_stack of the first push; negative: the range has no SWA pages
APPLY_FIELDS = 7

# op codes of apply
BIND = 0  # slab -> row
STORE = 1  # row -> slab
ADOPT = 2  # the row's SWA pages move under the slab's Full pages; the row's Full pages are freed
FREE_ROW = 3  # free the Full pages a row names, and their SWA pages
FREE_SLOT = 4  # the same for the pages of slab slots
DROP_ROW = 5  # free only the SWA pages under the Full pages a row names
DROP_SLOT = 6  # the same for the pages of slab slots
# write the four lengths of a row: (computed, allocated, owned, frontier) in N, PAGE, SLOT, FULL_POS
SET_ROW = 7

# the tree's copy on the device: records [num_records, 8] int32, 32 bytes a node; entries of the child
# table [slots, 2] int32. Meanings and sentinels: tree/arrays.py
RECORD_PARENT = 0
RECORD_START = 1
RECORD_PAGES = 2
RECORD_DEPTH = 3
RECORD_LIVE = 4
RECORD_GEN = 5
RECORD_HEAD = 6
RECORD_FIELDS = 8  # the last one is padding
ENTRY_TAG = 0
ENTRY_NODE = 1
ENTRY_FIELDS = 2
# secrets of the page hash, int64 [5 + P]; tree/hashing.py says what for
HASH_MULTIPLIER = 0
HASH_ADDEND = 1
HASH_HEAD_KEY = 2
HASH_HEAD_FACTOR = 3
HASH_ODD_FACTOR = 4
HASH_TOKEN_KEYS = 5  # one for each token of a page

# match: results [8, batch] int32, rows as in tree/match.py
MATCH_FULL_HIT = 0  # tokens
MATCH_REUSE = 1  # tokens
MATCH_BRANCH = 2  # tokens, -1 = none
MATCH_FULL_NODE = 3
MATCH_FULL_GEN = 4
MATCH_REUSE_NODE = 5
MATCH_REUSE_GEN = 6
MATCH_ROOT = 7
MATCH_FIELDS = 8
