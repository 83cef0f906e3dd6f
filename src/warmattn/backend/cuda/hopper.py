"""The attention kernel for Hopper (sm90), in Gluon: head dims 256 and 512.

One program attends 128 packed query rows (the query heads of a KV head share its tiles) over 64-key tiles
that lie at absolute keys, for 256 columns of V. Two warpgroups of consumers own 64 rows each; K and V reach
them through rings of shared memory, filled by one warp of bulk tensor copies (`_copy`) or, where V must be
converted on the way or an operand cannot be copied in bulk, by two warpgroups of loaders (`_load`).

Hopper's matrix unit truncates when it accumulates, so nothing stays in its accumulators for longer than one
tile: every P.V product starts fresh and is added to the running output in float32. Numbers are kept exact or
nearly so by what surrounds it:

* Q.K: four fresh accumulators, each over a quarter of D, added in float32.
* The exponential's base is an integer (the row maximum rounded up), so that every rescaling, within a split
  and between splits, is by a power of two and exact.
* P is scaled by 2^15 and split into two float16 terms; float16 V is exact.
* Any other V is split into two float16 terms as well. Each key's row is first scaled by a power of two that
  depends on that row alone (`_exponent`); the key's weights carry the inverse.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

__all__ = ["ROWS", "TILE", "attend"]

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
V_BITS = gl.constexpr(8)
"""A converted row of V with exponent 0 is scaled by 2^8."""
OCTAVES = gl.constexpr(16)
"""Exponents of V's rows are multiples of 16: the largest element of a scaled row lies in [2^-2, 2^14)."""

SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""64 rows x 64 columns in the matrix unit's accumulators: scores and chunks of the output alike."""
ROW = gl.constexpr(gl.SliceLayout(1, ACC.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, ACC.value))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LOAD = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
"""64 keys x 64 columns over the eight loading warps."""
WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [8, 1], [1, 0]))
"""`LOAD` by words of four codes."""
LOAD_ROW = gl.constexpr(gl.SliceLayout(1, LOAD.value))
LOAD_COLUMN = gl.constexpr(gl.SliceLayout(0, LOAD.value))
LOAD_EACH_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [8], [0]))
EACH_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
"""64 keys in every warp, so that a reduction over them needs no other warp."""


@aggregate
class Ring:
    """Slots of shared memory with their barriers. The n-th use of the ring takes slot n % depth."""

    slots: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    depth: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, slots, full, empty, depth):
        self.slots = slots
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
def _ring(slots, depth: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [depth, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [depth, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(depth):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    return Ring(slots, full, empty, depth)



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


@gluon.jit
def _copy(k, v, keys: Ring, values: Ring, block: Block, first, D: gl.constexpr):
    """The copying warp. Descriptors begin at key ``first``: rows outside them arrive as zeros."""
    for i in range(block.tiles):
        row = (block.tile0 + i) * TILE - first
        _copy_keys(k, keys, i, row, D)
        for c in gl.static_range(CHUNKS):
            use = i * CHUNKS + c
            slot = use % values.depth
            values.wait_empty(use)
            mbarrier.expect(values.full.index(slot), TILE * CHUNK * 2)
            tma.async_copy_global_to_shared(
                v, [row, block.column + c * CHUNK], values.full.index(slot), values.slots.index(slot)
            )


@gluon.jit
def _copy_keys(k, keys: Ring, i, row, D: gl.constexpr):
    slot = i % keys.depth
    keys.wait_empty(i)
    mbarrier.expect(keys.full.index(slot), TILE * D * 2)
    for c in gl.static_range(CHAINS):
        tma.async_copy_global_to_shared(
            k, [row, c * (D // CHAINS)], keys.full.index(slot), keys.slots.index(slot * CHAINS + c)
        )


@gluon.jit
def _product(q, k, a, b):
    zero = gl.zeros([64, TILE], gl.float32, layout=ACC)
    return warpgroup_mma(q.index(a), k.index(b).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _scores(q, k, a, b, TWO_IN_FLIGHT: gl.constexpr):
    """q @ k.T of one tile: four fresh accumulators over D/4 columns each, added in float32 in this order."""
    s = _product(q, k, a, b)
    if TWO_IN_FLIGHT:
        t = _product(q, k, a + 1, b + 1)
        s = warpgroup_mma_wait(1, deps=[s])
        u = _product(q, k, a + 2, b + 2)
        t = warpgroup_mma_wait(1, deps=[t])
        s = s + t
        t = _product(q, k, a + 3, b + 3)
        u = warpgroup_mma_wait(1, deps=[u])
        s = s + u
        t = warpgroup_mma_wait(0, deps=[t])
        s = s + t
    else:
        s = warpgroup_mma_wait(0, deps=[s])
        for c in gl.static_range(1, CHAINS):
            t = _product(q, k, a + c, b + c)
            t = warpgroup_mma_wait(0, deps=[t])
            s = s + t
    return s


@gluon.jit
def _tanh(x):
    """Cephes' tanhf: a polynomial near 0, where 1 - exp would cancel."""
    z = x * x
    near = gl.fma(z, gl.fma(z, gl.fma(z, gl.fma(z, z * 0 - 5.70498872745e-3, 2.06390887954e-2), -5.37397155531e-2), 1.33314422036e-1), -3.33332819422e-1)
    near = gl.fma(near * z, x, x)
    e = gl.exp2(gl.abs(x) * -2.885390081777927)
    far = gl.div_rn(1.0 - e, 1.0 + e)
    return gl.where(gl.abs(x) < 0.625, near, gl.where(x < 0, -far, far))


@gluon.jit
def _mask_kind(tile_map, map_columns, first_row, last_row, n0):
    """What the map says of the tile for all of the rows together: 0 hidden, 1 mixed, 2 open."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    row = first_row // 32 + gl.arange(0, 4, layout=gl.SliceLayout(1, L))
    column = n0 // 16 + gl.arange(0, 4, layout=gl.SliceLayout(0, L))
    inside = (row <= last_row // 32)[:, None] & (column < map_columns)[None, :]
    kind = gl.load(tile_map + row[:, None].to(gl.int64) * map_columns + column[None, :], mask=inside, other=3)
    kind = kind.to(gl.int32)
    low = gl.min(gl.min(kind, 1), 0)
    high = gl.max(gl.max(gl.where(inside, kind, 0), 1), 0)
    return gl.where(high == 0, 0, gl.where(low >= 2, 2, 1))


@gluon.jit
def _hide(s, n0, mask, mask_row, mask_step, in_call, inverse_scale, tile_map, map_columns, first_row, last_row, end,
          HAS_MAP: gl.constexpr):
    """Add the mask's cells to the scores of one tile; a hidden cell gives -inf."""
    kind = 1
    if HAS_MAP:
        kind = _mask_kind(tile_map, map_columns, first_row, last_row, n0)
    if kind == 0:
        s = gl.full_like(s, float("-inf"))
    elif kind == 1:
        n = n0 + gl.arange(0, TILE, layout=COLUMN)
        inside = in_call[:, None] & (n < end)[None, :]
        cells = gl.load(mask + mask_row[:, None] + (n.to(gl.int64) * mask_step)[None, :], mask=inside, other=0)
        if mask.dtype.element_ty == gl.float16:
            cells = cells.to(gl.float32)
            s = gl.where(cells > -1e30, gl.fma(cells, gl.full_like(s, inverse_scale), s), float("-inf"))
        else:
            s = gl.where(cells != 0, s, float("-inf"))
    return s


@gluon.jit
def _weigh(s, base, total, factor, exponents, CONVERTED: gl.constexpr):
    """Streaming softmax of one tile: weights as two float16 terms, what the past is rescaled by, and the new
    base and sum. A weight is ``2 ** (factor * s - base)``, at most 2^15.
    """
    factor_row = gl.full_like(base, factor)
    factor_tile = gl.full_like(s, factor)
    scaled = 0
    if CONVERTED:
        any_scaled = gl.max(gl.abs(exponents.load(EACH_WARP)), 0) != 0.0
        scaled = any_scaled.to(gl.int32)
    if scaled != 0:
        e = exponents.load(COLUMN)
        top = gl.max(gl.fma(s, factor_tile, gl.zeros_like(s) + e[None, :]), 1)
        new = gl.maximum(base, gl.ceil(top) - P_BITS)
        shift = gl.where(new == float("-inf"), 0.0, new)
        p = gl.exp2(gl.fma(s, factor_tile, gl.zeros_like(s) + e[None, :] - shift[:, None]))
        tile_sum = gl.sum(gl.exp2(gl.fma(s, factor_tile, gl.zeros_like(s) - shift[:, None])), 1)
    else:
        new = gl.maximum(base, gl.ceil(gl.max(s, 1) * factor_row) - P_BITS)
        shift = gl.where(new == float("-inf"), 0.0, new)
        p = gl.exp2(gl.fma(s, factor_tile, gl.zeros_like(s) - shift[:, None]))
        tile_sum = gl.sum(p, 1)
    rescale = gl.exp2(base - shift)
    total = gl.fma(total, rescale, tile_sum)
    high = p.to(gl.float16)
    low = (p - high.to(gl.float32)).to(gl.float16)
    return gl.convert_layout(high, WEIGHTS), gl.convert_layout(low, WEIGHTS), rescale, new, total


@gluon.jit
def _weighted(high, low, values: Ring, use, CONVERTED: gl.constexpr):
    """One 64-column chunk of P @ V in a fresh accumulator, in flight; smallest terms first."""
    zero = gl.zeros([64, CHUNK], gl.float32, layout=ACC)
    values.wait_full(use)
    slot = use % values.depth
    v = values.slots.index(slot)
    if CONVERTED:
        t = warpgroup_mma(high, values.slots.index(slot + values.depth), zero, use_acc=False, is_async=True)
        t = warpgroup_mma(low, v, t, is_async=True)
    else:
        t = warpgroup_mma(low, v, zero, use_acc=False, is_async=True)
    return warpgroup_mma(high, v, t, is_async=True)


@gluon.jit
def _add(a, rescale, t):
    return gl.fma(a, gl.zeros_like(a) + rescale[:, None], t)


@gluon.jit
def _power_of_two(x):
    """2 ** x of an integral x <= 0, exact down to the smallest subnormal; -inf gives 0."""
    n = gl.maximum(x, -252.0).to(gl.int32)
    near = gl.maximum(n, -126)
    a = ((near + 127) << 23).to(gl.float32, bitcast=True)
    b = ((n - near + 127) << 23).to(gl.float32, bitcast=True)
    return gl.where(x < -252.0, 0.0, a * b)


@gluon.jit
def _store_part(pointer, a, unscale, inside, column):
    d = column + gl.arange(0, CHUNK, layout=COLUMN)
    gl.store(pointer[:, None] + d[None, :], a * unscale, mask=inside[:, None])


@gluon.jit
def _fold_into(pointer, a, b, unscale, weights, divisor, is_first, is_last, inside, column):
    """Merge two chunks of a split's accumulator into the running total that ``out`` holds; after the last split,
    divide.
    """
    weight_before, weight = weights
    here = pointer[:, None] + (column + gl.arange(0, CHUNK, layout=COLUMN))[None, :]
    a = a * unscale
    b = b * unscale
    if not is_first:
        past_a = gl.load(here, mask=inside[:, None], other=0.0)
        past_b = gl.load(here + CHUNK, mask=inside[:, None], other=0.0)
        a = past_a * weight_before[:, None] + a * weight[:, None]
        b = past_b * weight_before[:, None] + b * weight[:, None]
    if is_last:
        inverse = gl.div_rn(gl.full_like(divisor, 1.0), divisor)
        a = _divide(a, inverse, divisor)
        b = _divide(b, inverse, divisor)
    gl.store(here, a, mask=inside[:, None])
    gl.store(here + CHUNK, b, mask=inside[:, None])


@gluon.jit
def _divide(a, inverse, divisor):
    """Markstein's correctly rounded division (1990): one reciprocal serves a row."""
    quotient = a * inverse[:, None]
    rest = gl.fma(gl.zeros_like(a) - quotient, gl.zeros_like(a) + divisor[:, None], a)
    return gl.fma(rest, gl.zeros_like(a) + inverse[:, None], quotient)


@gluon.jit
def _consume(W: gl.constexpr, q, keys: Ring, values: Ring, exponents, block: Block, outputs, masking, scaling,
             D: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASK: gl.constexpr, MAP: gl.constexpr,
             SOFTCAP: gl.constexpr, CONVERTED: gl.constexpr, WALK: gl.constexpr, SPLIT: gl.constexpr):
    """A consuming warpgroup: rows ``64 * W ...`` of the block over all of its tiles."""
    out, out_head, out_row, sums, maxima, unscale = outputs
    mask, mask_head, mask_row, mask_step, tile_map, map_columns, inverse_scale = masking
    factor, cap_in, cap_out = scaling

    packed = block.row0 + W * 64 + gl.arange(0, 64, layout=ROW)
    row = packed // block.group
    head = block.kv_head * block.group + packed % block.group
    in_call = row < block.rows
    first_row = (block.row0 + W * 64) // block.group
    last_row = gl.minimum((block.row0 + W * 64 + 63) // block.group, block.rows - 1)
    first = gl.full_like(row, block.start)
    last = gl.full_like(row, block.end - 1)
    all_from = block.start
    all_to = block.end
    if CAUSAL:
        last = gl.minimum(last, block.last0 + row)
        all_to = gl.minimum(all_to, block.last0 + first_row + 1)
    if WINDOW:
        first = gl.maximum(first, block.first0 + row)
        all_from = gl.maximum(all_from, block.first0 + last_row)
    mask_at = head.to(gl.int64) * mask_head + row.to(gl.int64) * mask_row
    out_at = out + head.to(gl.int64) * out_head + row.to(gl.int64) * out_row

    row_index = head.to(gl.int64) * block.rows + row
    writes_row = in_call & (block.column == 0)
    all_base = gl.full([64], float("-inf"), gl.float32, layout=ROW)
    all_total = gl.zeros([64], gl.float32, layout=ROW)
    tile = block.tile0
    end_tile = block.tile0 + block.tiles
    splits = 1
    if WALK:
        splits = gl.maximum((end_tile * TILE - 1) // SPLIT - tile * TILE // SPLIT + 1, 1)
    for split in range(splits):
        stop = end_tile
        if WALK:
            stop = gl.minimum(end_tile, (tile * TILE // SPLIT + 1) * (SPLIT // TILE))
        base = gl.full([64], float("-inf"), gl.float32, layout=ROW)
        total = gl.zeros([64], gl.float32, layout=ROW)
        a0 = gl.zeros([64, CHUNK], gl.float32, layout=ACC)
        a1 = gl.zeros([64, CHUNK], gl.float32, layout=ACC)
        a2 = gl.zeros([64, CHUNK], gl.float32, layout=ACC)
        a3 = gl.zeros([64, CHUNK], gl.float32, layout=ACC)
        for t in range(tile, stop):
            i = t - block.tile0
            n0 = t * TILE
            # An opaque zero: through indices it can follow, ptxas hoists dozens of matrix descriptors and spills.
            opaque = gl.inline_asm_elementwise(
                "{ .reg .u32 t; mov.u32 t, %clock_hi; shr.u32 $0, t, 31; }", "=r,r", [i], dtype=gl.int32,
                is_pure=False, pack=1
            )  # fmt: skip
            keys.wait_full(i)
            s = _scores(q, keys.slots, W * CHAINS + opaque, (i % keys.depth + opaque) * CHAINS, not CONVERTED)
            keys.release(i)
            if SOFTCAP:
                s = cap_out * _tanh(s * cap_in)
            if MASK:
                s = _hide(s, n0, mask, mask_at, mask_step, in_call, inverse_scale, tile_map, map_columns, first_row,
                          last_row, block.end, MAP)
            if (n0 < all_from) | (n0 + TILE > all_to):
                n = n0 + gl.arange(0, TILE, layout=COLUMN)
                seen = (n[None, :] >= first[:, None]) & (n[None, :] <= last[:, None])
                s = gl.where(seen, s, float("-inf"))
            use = (i + opaque) * CHUNKS
            if CONVERTED:
                values.wait_full(use)  # the loaders post a tile's exponents before its first chunk
            high, low, rescale, base, total = _weigh(s, base, total, factor, exponents.index(i & 1), CONVERTED)
            t0 = _weighted(high, low, values, use, CONVERTED)
            if CONVERTED:
                t0 = warpgroup_mma_wait(0, deps=[t0])
                values.release(use)
                a0 = _add(a0, rescale, t0)
                t1 = _weighted(high, low, values, use + 1, CONVERTED)
                t1 = warpgroup_mma_wait(0, deps=[t1])
                values.release(use + 1)
                a1 = _add(a1, rescale, t1)
                t2 = _weighted(high, low, values, use + 2, CONVERTED)
                t2 = warpgroup_mma_wait(0, deps=[t2])
                values.release(use + 2)
                a2 = _add(a2, rescale, t2)
                t3 = _weighted(high, low, values, use + 3, CONVERTED)
            else:
                t1 = _weighted(high, low, values, use + 1, CONVERTED)
                t0 = warpgroup_mma_wait(2, deps=[t0])
                values.release(use)
                a0 = _add(a0, rescale, t0)
                t2 = _weighted(high, low, values, use + 2, CONVERTED)
                t1 = warpgroup_mma_wait(2, deps=[t1])
                values.release(use + 1)
                a1 = _add(a1, rescale, t1)
                t3 = _weighted(high, low, values, use + 3, CONVERTED)
                t2 = warpgroup_mma_wait(2, deps=[t2])
                values.release(use + 2)
                a2 = _add(a2, rescale, t2)
            t3 = warpgroup_mma_wait(0, deps=[t3])
            values.release(use + 3)
            a3 = _add(a3, rescale, t3)

        if WALK:
            new = gl.maximum(all_base, base)
            shift = gl.where(new == float("-inf"), 0.0, new)
            weight_before = _power_of_two(all_base - shift)
            weight = _power_of_two(base - shift)
            all_total = all_total * weight_before + total * weight
            all_base = new
            divisor = gl.where(all_total == 0.0, 1.0, all_total)
            weights = (weight_before, weight)
            first_split = tile == block.tile0
            last_split = stop == end_tile
            column = block.column
            _fold_into(out_at, a0, a1, unscale, weights, divisor, first_split, last_split, in_call, column)
            column += 2 * CHUNK
            _fold_into(out_at, a2, a3, unscale, weights, divisor, first_split, last_split, in_call, column)
            tile = stop
        else:
            part = out + row_index * D
            _store_part(part, a0, unscale, in_call, block.column)
            _store_part(part, a1, unscale, in_call, block.column + CHUNK)
            _store_part(part, a2, unscale, in_call, block.column + 2 * CHUNK)
            _store_part(part, a3, unscale, in_call, block.column + 3 * CHUNK)
            all_base = base
            all_total = total
    gl.store(maxima + row_index, all_base, mask=writes_row)
    gl.store(sums + row_index, all_total, mask=writes_row)


def _lookup_asm(copies: int) -> str:
    """Four table entries by the four bytes of a word; ``copies`` of the table lie interleaved."""
    text = "{ .reg .u32 x0, x1, x2, x3;\n"
    for k in range(4):
        text += f"prmt.b32 x{k}, $4, 0, {0x4440 + k}; mad.lo.u32 x{k}, x{k}, {4 * copies}, $5;"
        text += f" ld.shared.f32 ${k}, [x{k}];\n"
    return text + "}"


LOOKUP_1 = gl.constexpr(_lookup_asm(1))
LOOKUP_32 = gl.constexpr(_lookup_asm(32))


@gluon.jit
def _table(centroids, code_mask, COPIES: gl.constexpr):
    """Put ``COPIES`` interleaved copies of the codebook, extended to 256 entries, into shared memory and return
    the address. With 32 of them each lane reads its own bank. Gluon before Triton 3.7 cannot gather from shared memory, nor name an
    address, so the table is a shared array of the assembly's own.
    """
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zero = gl.program_id(0) * 0
    ALLOCATE: gl.constexpr = "{ .shared .align 128 .b8 codebook[32768]; mov.u32 $0, codebook; }"
    ALLOCATE_1: gl.constexpr = "{ .shared .align 128 .b8 codebook[1024]; mov.u32 $0, codebook; }"
    address = gl.inline_asm_elementwise(
        ALLOCATE if COPIES == 32 else ALLOCATE_1, "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1
    )
    for start in range(0, 256 * COPIES, 128):
        i = start + gl.arange(0, 128, layout=L)
        entry = gl.load(centroids + ((i // COPIES) & code_mask))
        gl.inline_asm_elementwise(
            "st.shared.f32 [$1], $2; mov.u32 $0, 0;", "=r,r,f", [address + i * 4, entry], dtype=gl.int32,
            is_pure=False, pack=1
        )  # fmt: skip
    return address


@gluon.jit
def _widen(x, lookup, w, FORM: gl.constexpr, COPIES: gl.constexpr):
    """What `_fetch` returned, as float32 ``[64, 64]``. Codes: ``fl(centroid * w)``."""
    if FORM == "codes":
        c0, c1, c2, c3 = gl.inline_asm_elementwise(
            LOOKUP_32 if COPIES == 32 else LOOKUP_1, "=&f,=&f,=&f,=&f,r,r", [x, lookup],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1
        )  # fmt: skip
        c = gl.join(gl.join(c0, c2), gl.join(c1, c3)).reshape([TILE, CHUNK])
        y = gl.convert_layout(c, LOAD, assert_trivial=True) * w[:, None]
    else:
        y = x.to(gl.float32)
    return y


@gluon.jit
def _exponent(largest):
    """The power of two, by its exponent, that a row of V with this largest magnitude is divided by."""
    e = (largest.to(gl.int32, bitcast=True) >> 23) & 255
    # floor((e - 127 + 10) / 16) * 16 of a number >= -117, by a shift of a non-negative one
    e = (((e + 11) >> 4) << 4) - 128
    return gl.where(largest == 0.0, 0, gl.minimum(gl.maximum(e, -112), 120))


@gluon.jit
def _norms(norms, n0, block: Block, row, LAYOUT: gl.constexpr):
    """Norms of a tile's keys; 0 for keys that no row may see."""
    n = n0 + gl.arange(0, TILE, layout=LAYOUT)
    inside = (n >= block.start) & (n < block.end)
    return gl.load(norms + n.to(gl.int64) * row, mask=inside, other=0.0)


@gluon.jit
def _weight(norm, sf, D: gl.constexpr):
    """fl32(norm * 1/sqrt(D)), or fl32(norm / sf) of one 256-column block."""
    if D == 512:
        w = gl.div_rn(norm, gl.full_like(norm, sf))
    else:
        w = norm * 0.0625
    return w


@gluon.jit
def _fetch(v, n0, column, block: Block, v_step, FORM: gl.constexpr, V_ALIGNED: gl.constexpr):
    """Elements ``[64, 64]`` of V as they are stored, from key ``n0`` and ``column`` on; codes as words
    ``[64, 16]`` of four. Keys that no row may see give 0.
    """
    LAYOUT: gl.constexpr = WORDS if FORM == "codes" else LOAD
    r = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    inside = ((n0 + r >= block.start) & (n0 + r < block.end))[:, None]
    if FORM == "codes":
        word = gl.arange(0, CHUNK // 4, layout=gl.SliceLayout(0, LAYOUT))
        if V_ALIGNED:  # rows begin at multiples of 16 bytes, and 64 rows span less than 2^31
            words = (v + n0.to(gl.int64) * v_step + column).to(gl.pointer_type(gl.int32), bitcast=True)
            x = gl.load(words + (r * ((v_step // 16).to(gl.int32) * 4))[:, None] + word[None, :], mask=inside, other=0)
        else:
            at = ((n0 + r).to(gl.int64) * v_step)[:, None] + (column + 4 * word)[None, :]
            x = gl.load(v + at, mask=inside, other=0).to(gl.int32)
            for byte in gl.static_range(1, 4):
                x = x | (gl.load(v + at + byte, mask=inside, other=0).to(gl.int32) << (8 * byte))
    else:
        d = column + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LAYOUT))
        x = gl.load(v + ((n0 + r).to(gl.int64) * v_step)[:, None] + d[None, :], mask=inside, other=0)
    return x


@gluon.jit
def _load(k, v, norms, lookup, spread, keys: Ring, values: Ring, exponents, block: Block, first, strides, masking,
          D: gl.constexpr, MASK: gl.constexpr, FORM: gl.constexpr, COPIES: gl.constexpr, BULK_K: gl.constexpr,
          V_ALIGNED: gl.constexpr):
    """The loading warps: keys, and chunks of V, converted on the way. One loop over chunks keeps the code small:
    the roles of a program share an instruction cache.
    """
    k_step, v_step, norm_row, norm_step, sf = strides
    if COPIES == 32:
        lookup = gl.inline_asm_elementwise(
            "{ .reg .u32 t; mov.u32 t, %laneid; shl.b32 t, t, 2; add.u32 $0, $1, t; }", "=r,r", [lookup],
            dtype=gl.int32, is_pure=True, pack=1
        )  # fmt: skip
    n0 = block.tile0 * TILE
    x = _fetch(v, n0, block.column, block, v_step, FORM, V_ALIGNED)
    w = gl.full([TILE], 1.0, gl.float32, layout=LOAD_ROW)
    scale = w
    scaled = True
    for i in range(block.tiles):
        n0 = (block.tile0 + i) * TILE
        if BULK_K:
            _copy_keys(k, keys, i, n0 - first, D)
        else:
            _load_keys(k, keys, i, n0, k_step, block, D)
        n = n0 + gl.arange(0, TILE, layout=LOAD_ROW)
        keep = (n >= block.start) & (n < block.end)
        if MASK:
            keep = keep & _seen_by_any(n, keep, block, masking)
        if FORM == "codes":
            own = norms + norm_step * (block.column // COLUMNS)
            w = _weight(_norms(own, n0, block, norm_row, LOAD_ROW), sf, D)
            scaled = _has_unknown_exponent(norms, n0, block, norm_row, norm_step, sf, spread, D)
        if FORM != "f16":
            if scaled:
                e = _row_exponents(v, n0, keep, v_step, norms, norm_row, norm_step, sf, lookup, block, D, FORM, COPIES,
                                   V_ALIGNED)
                scale = ((V_BITS - e + 127) << 23).to(gl.float32, bitcast=True)
                exponents.index(i & 1).store(e.to(gl.float32))
            else:  # scaled by way of w, exactly: nothing is near the ends of float32 then
                w = w * 256.0
                exponents.index(i & 1).store(gl.zeros([TILE], gl.float32, layout=LOAD_ROW))
        for c in range(CHUNKS):
            use = i * CHUNKS + c
            # The next chunk is on its way while this one is converted.
            ahead = _fetch(
                v, n0 + (c + 1) // CHUNKS * TILE, block.column + (c + 1) % CHUNKS * CHUNK, block, v_step, FORM, V_ALIGNED
            )
            y = _widen(x, lookup, w, FORM, COPIES)
            if MASK:
                y = gl.where(keep[:, None], y, 0.0)
            slot = use % values.depth
            if FORM == "f16":
                values.wait_empty(use)
                values.slots.index(slot).store(y.to(gl.float16))
            else:  # the sum of two float16 terms, the second in the slot's twin ``depth`` further on
                if scaled:
                    y = y * scale[:, None]
                high = y.to(gl.float16)
                low = (y - high.to(gl.float32)).to(gl.float16)
                values.wait_empty(use)
                values.slots.index(slot).store(high)
                values.slots.index(slot + values.depth).store(low)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(values.full.index(slot), count=1)
            x = ahead


@gluon.jit
def _load_keys(k, keys: Ring, i, n0, k_step, block: Block, D: gl.constexpr):
    """What `_copy_keys` does, by ordinary loads: for operands that bulk copies cannot read."""
    keys.wait_empty(i)
    n = n0 + gl.arange(0, TILE, layout=LOAD_ROW)
    inside = (n >= block.start) & (n < block.end)
    for c in gl.static_range(CHAINS):
        d = c * (D // CHAINS) + gl.arange(0, D // CHAINS, layout=LOAD_COLUMN)
        x = gl.load(k + (n.to(gl.int64) * k_step)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        keys.slots.index((i % keys.depth) * CHAINS + c).store(x)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(keys.full.index(i % keys.depth), count=1)


@gluon.jit
def _has_unknown_exponent(norms, n0, block: Block, norm_row, norm_step, sf, spread, D: gl.constexpr):
    """Whether some row's `_exponent` may be another than 0. A row's largest magnitude lies between the codebook's
    least and largest magnitude times w, and mostly that is enough to know.
    """
    least, most = spread
    norm = gl.abs(_norms(norms, n0, block, norm_row, LOAD_EACH_WARP))
    if D == 512:
        norm = gl.maximum(norm, gl.abs(_norms(norms + norm_step, n0, block, norm_row, LOAD_EACH_WARP)))
    w = _weight(norm, sf, D)
    known = ((w * least >= 0.0009765625) & (w * most < 64.0)) | (w == 0.0)
    return gl.min(known.to(gl.int32), 0) == 0


@gluon.jit
def _row_exponents(v, n0, keep, v_step, norms, norm_row, norm_step, sf, lookup, block: Block, D: gl.constexpr,
                   FORM: gl.constexpr, COPIES: gl.constexpr, V_ALIGNED: gl.constexpr):
    """`_exponent` of whole rows, read for the purpose."""
    largest = gl.zeros([TILE], gl.float32, layout=LOAD_ROW)
    w = largest
    for c in range(D // CHUNK):
        if FORM == "codes":
            w = _weight(_norms(norms + norm_step * (c // 4), n0, block, norm_row, LOAD_ROW), sf, D)
        x = _widen(_fetch(v, n0, c * CHUNK, block, v_step, FORM, V_ALIGNED), lookup, w, FORM, COPIES)
        largest = gl.maximum(largest, gl.max(gl.abs(x), 1))
    return _exponent(gl.where(keep, largest, 0.0))


@gluon.jit
def _seen_by_any(n, inside, block: Block, masking):
    """Whether the mask shows a key to any row of the block: a key that it hides from all may hold anything."""
    mask, mask_head, mask_row, mask_step, tile_map, map_columns, inverse_scale = masking
    seen = gl.zeros([TILE], gl.int32, layout=LOAD_ROW)
    for start in range(0, ROWS, 64):
        packed = block.row0 + start + gl.arange(0, 64, layout=LOAD_COLUMN)
        row = packed // block.group
        head = block.kv_head * block.group + packed % block.group
        at = head.to(gl.int64) * mask_head + row.to(gl.int64) * mask_row
        readable = inside[:, None] & (row < block.rows)[None, :]
        cells = gl.load(mask + at[None, :] + (n.to(gl.int64) * mask_step)[:, None], mask=readable, other=0)
        if mask.dtype.element_ty == gl.float16:
            shown = readable & (cells.to(gl.float32) > -1e30)
        else:
            shown = cells != 0
        seen = gl.maximum(seen, gl.max(shown.to(gl.int32), 1))
    return seen != 0


@gluon.jit(
    do_not_specialize=[
        "q_batch", "q_head", "q_row", "k_batch", "k_head", "k_step", "v_batch", "v_head", "v_step",
        "norm_batch", "norm_head", "norm_row", "norm_step", "code_mask", "least", "most", "sf",
        "mask_batch", "mask_head", "mask_row", "mask_step", "inverse_scale", "map_columns",
        "out_batch", "out_head", "out_row", "unscale", "q_offset", "kv_len", "kv_start", "key_offset", "window",
        "H", "Hk", "S", "capacity", "factor", "cap_in", "cap_out", "first_split", "batch_size",
    ]
)  # fmt: skip
def attend(
    q, q_batch: gl.int64, q_head: gl.int64, q_row: gl.int64,
    k, k_batch: gl.int64, k_head: gl.int64, k_step: gl.int64,
    v, v_batch: gl.int64, v_head: gl.int64, v_step: gl.int64,
    norms, norm_batch: gl.int64, norm_head: gl.int64, norm_row: gl.int64, norm_step: gl.int64,
    centroids, code_mask, least, most, sf,
    mask, mask_batch: gl.int64, mask_head: gl.int64, mask_row: gl.int64, mask_step: gl.int64, inverse_scale,
    tile_map, map_columns,
    out, out_batch: gl.int64, out_head: gl.int64, out_row: gl.int64, maxima, sums, unscale,
    q_offsets, kv_lens, kv_starts, q_offset, kv_len, kv_start, key_offset, window,
    H, Hk, S, capacity, factor, cap_in, cap_out, first_split, batch_size,
    D: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASK: gl.constexpr, MAP: gl.constexpr,
    SOFTCAP: gl.constexpr, LENGTHS: gl.constexpr, FORM: gl.constexpr, BULK_K: gl.constexpr, BULK_V: gl.constexpr,
    V_ALIGNED: gl.constexpr, OUT_ALIGNED: gl.constexpr, WALK: gl.constexpr, SPLIT: gl.constexpr, K_STAGES: gl.constexpr, V_SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attention of packed rows. Grid: (B * Hk * D / 256, tiles of rows, 1 or splits).

    WALK: one program folds all splits of its rows into ``out``; else each writes its split's partial results,
    ``out [splits, B, H, S, D]``, and ``maxima`` and ``sums [splits, B, H, S]``.
    """
    HALVES: gl.constexpr = D // COLUMNS
    CONVERTED: gl.constexpr = FORM != "f16"
    COPIES: gl.constexpr = 32 if (D == 256) & (FORM == "codes") else 1
    if BULK_K:  # strides come in units of 16 bytes then
        k_step = k_step * 8
        q_batch, q_head, q_row = q_batch * 8, q_head * 8, q_row * 8
    if V_ALIGNED:
        UNIT: gl.constexpr = 128 // v.dtype.element_ty.primitive_bitwidth
        v_batch, v_head, v_step = v_batch * UNIT, v_head * UNIT, v_step * UNIT
    if OUT_ALIGNED:
        out_batch, out_head, out_row = out_batch * 2, out_head * 2, out_row * 2
    group = H // Hk
    head = gl.program_id(0) // HALVES
    b = head // Hk
    kv_head = head % Hk
    row0 = (gl.num_programs(1) - 1 - gl.program_id(1)) * ROWS
    first_row = row0 // group
    last_row = gl.minimum((row0 + ROWS - 1) // group, S - 1)

    # Row i sees the keys [first0 + i, last0 + i] of [start, end).
    if LENGTHS:
        q_offset = gl.load(q_offsets + b)
        kv_len = gl.load(kv_lens + b)
        kv_start = gl.load(kv_starts + b)
    end = gl.minimum(gl.maximum(kv_len, 0), capacity)
    start = gl.minimum(gl.maximum(kv_start, 0), end)
    last0 = end
    first0 = 0 - S
    if CAUSAL:
        position = q_offset.to(gl.int64) - key_offset
        last0 = gl.minimum(gl.maximum(position, 0 - S), capacity).to(gl.int32)
        end = gl.minimum(end, last0 + S)
        if WINDOW:
            first0 = gl.minimum(gl.maximum(position - window + 1, 0 - S), capacity).to(gl.int32)
            start = gl.maximum(start, first0)
    from_key = start
    to_key = end
    if CAUSAL:
        to_key = gl.minimum(to_key, last0 + last_row + 1)
        if WINDOW:
            from_key = gl.maximum(from_key, first0 + first_row)
    split = 0
    if not WALK:
        split = gl.program_id(2)
        from_key = gl.maximum(from_key, (first_split + split) * SPLIT)
        to_key = gl.minimum(to_key, (first_split + split + 1) * SPLIT)
    tile0 = from_key // TILE
    tiles = gl.maximum((to_key + TILE - 1) // TILE - tile0, 0)
    tiles = gl.where(to_key > from_key, tiles, 0)
    block = Block(b, kv_head, (gl.program_id(0) % HALVES) * COLUMNS, row0, S, group, first0, last0, start, end, tile0,
                  tiles)

    k += b.to(gl.int64) * k_batch + kv_head.to(gl.int64) * k_head
    v += b.to(gl.int64) * v_batch + kv_head.to(gl.int64) * v_head
    mask += b.to(gl.int64) * mask_batch
    rows_before = (split * batch_size + b).to(gl.int64) * H * S
    if WALK:
        out += b.to(gl.int64) * out_batch
    else:
        out += rows_before * D
    outputs = (out, out_head, out_row, sums + rows_before, maxima + rows_before, unscale)
    masking = (mask, mask_head, mask_row, mask_step, tile_map, map_columns, inverse_scale)
    scaling = (factor, cap_in, cap_out)

    q_slots = gl.allocate_shared_memory(q.dtype.element_ty, [2 * CHAINS, 64, D // CHAINS], SHARED)
    k_slots = gl.allocate_shared_memory(q.dtype.element_ty, [K_STAGES * CHAINS, TILE, D // CHAINS], SHARED)
    PLANES: gl.constexpr = 2 if CONVERTED else 1
    v_slots = gl.allocate_shared_memory(gl.float16, [PLANES * V_SLOTS, TILE, CHUNK], SHARED)
    exponents = gl.allocate_shared_memory(gl.float32, [2, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    keys = _ring(k_slots, K_STAGES)
    values = _ring(v_slots, V_SLOTS)
    lookup = 0
    if FORM == "codes":
        norms += b.to(gl.int64) * norm_batch + kv_head.to(gl.int64) * norm_head
        lookup = _table(centroids, code_mask, COPIES)

    q += b.to(gl.int64) * q_batch
    for w in gl.static_range(2):
        packed = row0 + w * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, QUERIES))
        row = packed // group
        at = (kv_head * group + packed % group).to(gl.int64) * q_head + row.to(gl.int64) * q_row
        for c in gl.static_range(CHAINS):
            d = c * (D // CHAINS) + gl.arange(0, D // CHAINS, layout=gl.SliceLayout(0, QUERIES))
            x = gl.load(q + at[:, None] + d[None, :], mask=(row < S)[:, None], other=0.0)
            q_slots.index(w * CHAINS + c).store(x)
    fence_async_shared()

    # Bulk copies begin at the first key of the call and end behind the last: the rest arrives as zeros.
    first = start
    bulk_k = k
    bulk_v = v
    if BULK_K:
        bulk_k = tma.make_tensor_descriptor(
            k + start.to(gl.int64) * k_step, [gl.maximum(end - start, 1), D], [k_step, 1], [TILE, D // CHAINS], SHARED
        )
    if BULK_V:
        bulk_v = tma.make_tensor_descriptor(
            v + start.to(gl.int64) * v_step, [gl.maximum(end - start, 1), D], [v_step, 1], [TILE, CHUNK], SHARED
        )
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    if BULK_V:
        gl.warp_specialize(
            [
                (_consume, (W0, q_slots, keys, values, exponents, block, outputs, masking, scaling, D, CAUSAL,
                            WINDOW, MASK, MAP, SOFTCAP, CONVERTED, WALK, SPLIT)),
                (_consume, (W1, q_slots, keys, values, exponents, block, outputs, masking, scaling, D, CAUSAL,
                            WINDOW, MASK, MAP, SOFTCAP, CONVERTED, WALK, SPLIT)),
                (_copy, (bulk_k, bulk_v, keys, values, block, first, D)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        strides = (k_step, v_step, norm_row, norm_step, sf)
        spread = (least, most)
        gl.warp_specialize(
            [
                (_consume, (W0, q_slots, keys, values, exponents, block, outputs, masking, scaling, D, CAUSAL,
                            WINDOW, MASK, MAP, SOFTCAP, CONVERTED, WALK, SPLIT)),
                (_consume, (W1, q_slots, keys, values, exponents, block, outputs, masking, scaling, D, CAUSAL,
                            WINDOW, MASK, MAP, SOFTCAP, CONVERTED, WALK, SPLIT)),
                (_load, (bulk_k, v, norms, lookup, spread, keys, values, exponents, block, first, strides, masking, D,
                         MASK, FORM, COPIES, BULK_K, V_ALIGNED)),
            ],
            [4, 8],
            [CONSUMER_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
