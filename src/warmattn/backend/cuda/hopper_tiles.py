"""What the roles of the Hopper kernel share: sizes, layouts, and the values that travel together."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

TILE = gl.constexpr(64)
"""Keys of a tile."""
ROWS = gl.constexpr(128)
"""Packed query rows of a program."""
COLUMNS = gl.constexpr(256)
"""Columns of V of a program."""
CHUNK = gl.constexpr(64)
"""Columns of one slot of the V ring."""
CHUNKS = gl.constexpr(4)
CHAINS = gl.constexpr(4)
"""Fresh accumulators of Q.K."""

P_BITS = gl.constexpr(15.0)
"""P is at most 2^15, within float16's range."""
P_UNIT = gl.constexpr(2.0**-15)
"""Undoes that."""
V_BITS = gl.constexpr(8)
"""A converted row of V with exponent 0 is scaled by 2^8."""

SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""64 rows x 64 columns in the matrix unit's accumulators: scores and chunks of the output alike."""
ROW = gl.constexpr(gl.SliceLayout(1, ACC.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, ACC.value))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Rows of Q over the four warps that the kernel begins with."""
LOAD = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
"""Keys x columns over the eight loading warps."""
WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [8, 1], [1, 0]))
"""`LOAD` by words of four codes."""
LOAD_ROW = gl.constexpr(gl.SliceLayout(1, LOAD.value))
LOAD_COLUMN = gl.constexpr(gl.SliceLayout(0, LOAD.value))
EACH_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
EACH_LOADING_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))
"""64 keys in every warp, so that a reduction over them needs no other warp."""


@aggregate
class Ring:
    """Slots of shared memory with their barriers. The n-th use of the ring takes slot n % depth."""

    slots: gl.shared_memory_descriptor
    low: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    depth: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, slots, low, full, empty, depth):
        self.slots = slots
        self.low = low
        self.full = full
        self.empty = empty
        self.depth = gl.constexpr(depth)

    @gluon.jit
    def wait_full(self, use):
        mbarrier.wait(self.full.index(use % self.depth), (use // self.depth) & 1)

    @gluon.jit
    def wait_empty(self, use):
        mbarrier.wait(self.empty.index(use % self.depth), ((use // self.depth) & 1) ^ 1)

    @gluon.jit
    def release(self, use):
        mbarrier.arrive(self.empty.index(use % self.depth), count=1)


@gluon.jit
def make_ring(slots, low, depth: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [depth, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [depth, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(depth):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    return Ring(slots, low, full, empty, depth)


@aggregate
class Block:
    """What one program attends: its rows and the keys that any row of the call may see, in rows of K."""

    b: gl.tensor
    kv_head: gl.tensor
    column: gl.tensor
    row0: gl.tensor
    rows: gl.tensor
    group: gl.tensor
    first0: gl.tensor
    last0: gl.tensor
    start: gl.tensor
    end: gl.tensor
    tile0: gl.tensor
    tiles: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, kv_head, column, row0, rows, group, first0, last0, start, end, tile0, tiles):
        self.b = b
        self.kv_head = kv_head
        self.column = column
        self.row0 = row0
        self.rows = rows
        self.group = group
        self.first0 = first0
        self.last0 = last0
        self.start = start
        self.end = end
        self.tile0 = tile0
        self.tiles = tiles


@aggregate
class Variant:
    """The constants that say which kernel this is."""

    D: gl.constexpr
    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    MASK: gl.constexpr
    MAP: gl.constexpr
    SOFTCAP: gl.constexpr
    FORM: gl.constexpr
    CONVERTED: gl.constexpr
    COPIES: gl.constexpr
    BULK_K: gl.constexpr
    BULK_V: gl.constexpr
    V_ALIGNED: gl.constexpr
    WALK: gl.constexpr
    SPLIT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, D, CAUSAL, WINDOW, MASK, MAP, SOFTCAP, FORM, BULK_K, BULK_V, V_ALIGNED, WALK, SPLIT):
        self.D = gl.constexpr(D)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.WINDOW = gl.constexpr(WINDOW)
        self.MASK = gl.constexpr(MASK)
        self.MAP = gl.constexpr(MAP)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.FORM = gl.constexpr(FORM)
        self.CONVERTED = gl.constexpr(FORM != "f16")
        self.COPIES = gl.constexpr(32 if D == 256 and FORM == "codes" else 1)
        self.BULK_K = gl.constexpr(BULK_K)
        self.BULK_V = gl.constexpr(BULK_V)
        self.V_ALIGNED = gl.constexpr(V_ALIGNED)
        self.WALK = gl.constexpr(WALK)
        self.SPLIT = gl.constexpr(SPLIT)


@aggregate
class Mask:
    """An external mask and its map."""

    cells: gl.tensor
    head: gl.tensor
    row: gl.tensor
    step: gl.tensor
    inverse_scale: gl.tensor
    tiles: gl.tensor
    columns: gl.tensor

    @gluon.constexpr_function
    def __init__(self, cells, head, row, step, inverse_scale, tiles, columns):
        self.cells = cells
        self.head = head
        self.row = row
        self.step = step
        self.inverse_scale = inverse_scale
        self.tiles = tiles
        self.columns = columns


@aggregate
class Values:
    """V as it lies in memory, and what decodes it."""

    data: gl.tensor
    step: gl.tensor
    norms: gl.tensor
    norm_row: gl.tensor
    norm_block: gl.tensor
    sf: gl.tensor
    lookup: gl.tensor
    centroids: gl.tensor
    code_mask: gl.tensor

    @gluon.constexpr_function
    def __init__(self, data, step, norms, norm_row, norm_block, sf, lookup, centroids, code_mask):
        self.data = data
        self.step = step
        self.norms = norms
        self.norm_row = norm_row
        self.norm_block = norm_block
        self.sf = sf
        self.lookup = lookup
        self.centroids = centroids
        self.code_mask = code_mask


@gluon.jit
def mask_kind(mask: Mask, first_row, last_row, n0, WARPS: gl.constexpr):
    """What the map says of the tile for all of the rows together: 0 hidden, 1 mixed, 2 open."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0])
    row = first_row // 32 + gl.arange(0, 4, layout=gl.SliceLayout(1, L))
    column = n0 // 16 + gl.arange(0, 4, layout=gl.SliceLayout(0, L))
    inside = (row <= last_row // 32)[:, None] & (column < mask.columns)[None, :]
    at = row[:, None].to(gl.int64) * mask.columns + column[None, :]
    kind = gl.load(mask.tiles + at, mask=inside, other=3)
    kind = kind.to(gl.int32)
    low = gl.min(gl.min(kind, 1), 0)
    high = gl.max(gl.max(gl.where(inside, kind, 0), 1), 0)
    return gl.where(high == 0, 0, gl.where(low >= 2, 2, 1))
