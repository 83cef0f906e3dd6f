"""The roles of the Hopper kernel that bring keys and values into shared memory."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from warmattn.backend.cuda.hopper_tiles import (
    CHAINS,
    CHUNK,
    CHUNKS,
    COLUMNS,
    EACH_LOADING_WARP,
    LOAD,
    LOAD_COLUMN,
    LOAD_ROW,
    ROWS,
    TILE,
    V_BITS,
    WORDS,
    Block,
    Mask,
    Ring,
    Values,
    Variant,
    mask_kind,
)

__all__ = ["copy_tiles", "load_tiles", "make_table"]

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Renamed in Triton 3.7."""


@gluon.jit
def copy_tiles(k, v, keys: Ring, chunks: Ring, block: Block, variant: Variant):
    """The copying warp. Descriptors begin at key ``block.start``: rows outside them arrive as zeros."""
    for i in range(block.tiles):
        row = (block.tile0 + i) * TILE - block.start
        _copy_keys(k, keys, i, row, variant.D)
        for c in gl.static_range(CHUNKS):
            use = i * CHUNKS + c
            slot = use % chunks.depth
            chunks.wait_empty(use)
            mbarrier.expect(chunks.full.index(slot), TILE * CHUNK * 2)
            tma.async_copy_global_to_shared(
                v, [row, block.column + c * CHUNK], chunks.full.index(slot), chunks.slots.index(slot)
            )


@gluon.jit
def _copy_keys(k, keys: Ring, i, row, D: gl.constexpr):
    slot = i % keys.depth
    keys.wait_empty(i)
    mbarrier.expect(keys.full.index(slot), TILE * D * 2)
    tma.async_copy_global_to_shared(k, [row, 0], keys.full.index(slot), keys.slots.index(slot))


def _lookup_asm(copies: int) -> str:
    """Four table entries by the four bytes of a word; ``copies`` of the table lie interleaved."""
    text = "{ .reg .u32 x0, x1, x2, x3;\n"
    for k in range(4):
        text += f"prmt.b32 x{k}, $4, 0, {0x4440 + k}; mad.lo.u32 x{k}, x{k}, {4 * copies}, $5;"
        text += f" ld.shared.f32 ${k}, [x{k}];\n"
    return text + "}"


LOOKUP_1 = gl.constexpr(_lookup_asm(1))
LOOKUP_32 = gl.constexpr(_lookup_asm(32))


SPLIT = gl.constexpr("""{ .reg .b16 l, h; .reg .f32 x, y;
cvt.rn.f16x2.f32 $0, $3, $2; mov.b32 {l, h}, $0;
cvt.f32.f16 x, l; sub.rn.f32 x, $2, x;
cvt.f32.f16 y, h; sub.rn.f32 y, $3, y;
cvt.rn.f16x2.f32 $1, y, x; }""")
"""Two numbers as sums of two float16 terms. Triton would convert them one at a time."""


@gluon.jit
def make_table(centroids, code_mask, COPIES: gl.constexpr):
    """Put ``COPIES`` interleaved copies of the codebook, extended to 256 entries, into shared memory and
    return its address. With 32 copies each lane reads its own bank. Gluon before Triton 3.7 can neither
    gather from shared memory nor name an address in it, so the table is a shared array of the assembly's own.
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
def _spread(v: Values):
    """Least and largest magnitude of the codebook."""
    WHOLE: gl.constexpr = gl.BlockedLayout([8], [32], [8], [0])
    magnitudes = gl.abs(gl.load(v.centroids + (gl.arange(0, 256, layout=WHOLE) & v.code_mask)))
    return gl.min(magnitudes, 0), gl.max(magnitudes, 0)


@gluon.jit
def _own_copy(lookup):
    """This lane's copy of the table: its address of entry 0."""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 t; mov.u32 t, %laneid; shl.b32 t, t, 2; add.u32 $0, $1, t; }", "=r,r", [lookup],
        dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _widen(x, lookup, w, variant: Variant):
    """What `_fetch` returned, as float32 ``[64, 64]``. Codes: ``fl(centroid * w)``."""
    if variant.FORM == "codes":
        c0, c1, c2, c3 = gl.inline_asm_elementwise(
            LOOKUP_32 if variant.COPIES == 32 else LOOKUP_1, "=&f,=&f,=&f,=&f,r,r", [x, lookup],
            dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1
        )  # fmt: skip
        c = gl.join(gl.join(c0, c2), gl.join(c1, c3)).reshape([TILE, CHUNK])
        y = gl.convert_layout(c, LOAD, assert_trivial=True) * w[:, None]
    else:
        y = x.to(gl.float32)
    return y


@gluon.jit
def _exponent(largest):
    """The power of two, by its exponent, that a row of V with this largest magnitude is divided by: a
    multiple of 16, which leaves the largest magnitude in [2^-2, 2^14) after scaling by 2^`V_BITS`.
    """
    e = (largest.to(gl.int32, bitcast=True) >> 23) & 255
    # floor((e - 127 + 10) / 16) * 16 of a number >= -117, by a shift of a non-negative one
    e = (((e + 11) >> 4) << 4) - 128
    return gl.where(largest == 0.0, 0, gl.minimum(gl.maximum(e, -96), 120))


@gluon.jit
def _norms(v: Values, n0, column_block, block: Block, LAYOUT: gl.constexpr):
    """Norms of a tile's keys, of one block of 256 columns; 0 for keys that no row may see."""
    n = n0 + gl.arange(0, TILE, layout=LAYOUT)
    inside = (n >= block.start) & (n < block.end)
    at = v.norm_block * column_block + n.to(gl.int64) * v.norm_row
    return gl.load(v.norms + at, mask=inside, other=0.0)


@gluon.jit
def _weight(norm, sf, D: gl.constexpr):
    """fl32(norm * 1/sqrt(D)), or fl32(norm / sf) of one block of 256 columns."""
    if D == 512:
        w = gl.div_rn(norm, gl.full_like(norm, sf))
    else:
        w = norm * 0.0625
    return w


@gluon.jit
def _fetch(v: Values, n0, column, block: Block, variant: Variant):
    """Elements ``[64, 64]`` of V as they are stored, from key ``n0`` and ``column`` on; codes as words
    ``[64, 16]`` of four. Keys that no row may see give 0.
    """
    LAYOUT: gl.constexpr = WORDS if variant.FORM == "codes" else LOAD
    r = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    inside = ((n0 + r >= block.start) & (n0 + r < block.end))[:, None]
    if variant.FORM == "codes":
        word = gl.arange(0, CHUNK // 4, layout=gl.SliceLayout(0, LAYOUT))
        if variant.V_ALIGNED:  # rows begin at multiples of 16 bytes, and 64 of them span less than 2^31
            words = (v.data + n0.to(gl.int64) * v.step + column).to(gl.pointer_type(gl.int32), bitcast=True)
            at = (r * ((v.step // 16).to(gl.int32) * 4))[:, None] + word[None, :]
            x = gl.load(words + at, mask=inside, other=0)
        else:
            at = ((n0 + r).to(gl.int64) * v.step)[:, None] + (column + 4 * word)[None, :]
            x = gl.load(v.data + at, mask=inside, other=0).to(gl.int32)
            for byte in gl.static_range(1, 4):
                x = x | (gl.load(v.data + at + byte, mask=inside, other=0).to(gl.int32) << (8 * byte))
    else:
        d = column + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LAYOUT))
        at = ((n0 + r).to(gl.int64) * v.step)[:, None] + d[None, :]
        x = gl.load(v.data + at, mask=inside, other=0)
    return x


@gluon.jit
def load_tiles(
    k, k_step, v: Values, keys: Ring, chunks: Ring, exponents, block: Block, mask: Mask, variant: Variant,
):  # fmt: skip
    """The loading warps: keys, and chunks of V, converted on the way. One loop over chunks keeps the code
    small: the roles of a program share an instruction cache.
    """
    lookup = v.lookup
    spread = (0.0, 0.0)
    if variant.FORM == "codes":
        spread = _spread(v)
    if variant.COPIES == 32:
        lookup = _own_copy(lookup)
    x = _fetch(v, block.tile0 * TILE, block.column, block, variant)
    w = gl.full([TILE], 1.0, gl.float32, layout=LOAD_ROW)
    norms = _fetch_norms(v, block.tile0 * TILE, block, variant)
    for i in range(block.tiles):
        n0 = (block.tile0 + i) * TILE
        if variant.BULK_K:
            _copy_keys(k, keys, i, n0 - block.start, variant.D)
        else:
            _load_keys(k, keys, i, n0, k_step, block, variant.D)
        keep = _kept(n0, block, mask, variant)
        if variant.FORM == "codes":
            w = _weight(norms[0], v.sf, variant.D)
            unknown = _has_unknown_exponent(norms, n0, spread, v.sf, block, variant.D)
            norms = _fetch_norms(v, n0 + TILE, block, variant)
            if unknown:
                x = _load_scaled(v, chunks, exponents, x, w, lookup, keep, i, block, variant)
            else:  # scaled by way of w, exactly: nothing is near the ends of float32 then
                exponents.index(i & 1).store(gl.zeros([TILE], gl.float32, layout=LOAD_ROW))
                x = _load_chunks(v, chunks, x, w * 256.0, w, lookup, keep, i, block, variant, False)
        elif variant.CONVERTED:
            x = _load_scaled(v, chunks, exponents, x, w, lookup, keep, i, block, variant)
        else:
            x = _load_chunks(v, chunks, x, w, w, lookup, keep, i, block, variant, False)


@gluon.jit
def _load_scaled(
    v: Values, chunks: Ring, exponents, x, w, lookup, keep, i, block: Block, variant: Variant,
):  # fmt: skip
    """Tile i with every row scaled by a power of two of its own."""
    n0 = (block.tile0 + i) * TILE
    largest = _largest_of_rows(v, n0, lookup, keep, block, variant)
    e = _exponent(largest)
    # Rows of zeros weigh nothing, those that lie outside hide behind their scores.
    n = n0 + gl.arange(0, TILE, layout=LOAD_ROW)
    empty = (largest == 0.0) & (n >= block.start) & (n < block.end)
    exponents.index(i & 1).store(gl.where(empty, float("-inf"), e.to(gl.float32)))
    scale = ((V_BITS - e + 127) << 23).to(gl.float32, bitcast=True)
    return _load_chunks(v, chunks, x, w, scale, lookup, keep, i, block, variant, True)


@gluon.jit
def _load_chunks(
    v: Values, chunks: Ring, x, w, scale, lookup, keep, i, block: Block, variant: Variant,
    SCALED: gl.constexpr,
):  # fmt: skip
    """The chunks of tile i, of which ``x`` holds the first; returns the first of the next tile, fetched."""
    n0 = (block.tile0 + i) * TILE
    for c in range(CHUNKS):
        use = i * CHUNKS + c
        slot = use % chunks.depth
        # The next chunk is on its way while this one is converted.
        later = c + 1
        next_column = block.column + later % CHUNKS * CHUNK
        next_x = _fetch(v, n0 + later // CHUNKS * TILE, next_column, block, variant)
        y = _widen(x, lookup, w, variant)
        if variant.MASK:
            y = gl.where(keep[:, None], y, 0.0)
        if SCALED:
            y = y * scale[:, None]
        if variant.CONVERTED:  # the sum of two float16 terms
            high, low = gl.inline_asm_elementwise(
                SPLIT, "=&r,=&r,f,f", [y], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
            )
            chunks.wait_empty(use)
            chunks.slots.index(slot).store(high)
            chunks.low.index(slot).store(low)
        else:
            chunks.wait_empty(use)
            chunks.slots.index(slot).store(y.to(gl.float16))
        thread_barrier()
        mbarrier.arrive(chunks.full.index(slot), count=1)
        x = next_x
    return x


@gluon.jit
def _kept(n0, block: Block, mask: Mask, variant: Variant):
    """Which keys of a tile some row of the block may see; what the others hold must leave no trace."""
    n = n0 + gl.arange(0, TILE, layout=LOAD_ROW)
    keep = (n >= block.start) & (n < block.end)
    if variant.MASK:
        kind = 1
        if variant.MAP:
            last_row = gl.minimum((block.row0 + ROWS - 1) // block.group, block.rows - 1)
            kind = mask_kind(mask, block.row0 // block.group, last_row, n0, 8)
        if kind == 0:
            keep = n < 0
        elif kind == 1:
            seen = gl.zeros([TILE], gl.int32, layout=LOAD_ROW)
            for start in range(0, ROWS, 64):
                packed = block.row0 + start + gl.arange(0, 64, layout=LOAD_COLUMN)
                row = packed // block.group
                head = block.kv_head * block.group + packed % block.group
                row_at = head.to(gl.int64) * mask.head + row.to(gl.int64) * mask.row
                readable = keep[:, None] & (row < block.rows)[None, :]
                at = row_at[None, :] + (n.to(gl.int64) * mask.step)[:, None]
                cells = gl.load(mask.cells + at, mask=readable, other=0)
                if mask.cells.dtype.element_ty == gl.float16:
                    shown = readable & (cells.to(gl.float32) > -1e30)
                else:
                    shown = cells != 0
                seen = gl.maximum(seen, gl.max(shown.to(gl.int32), 1))
            keep = keep & (seen != 0)
    return keep


@gluon.jit
def _load_keys(k, keys: Ring, i, n0, k_step, block: Block, D: gl.constexpr):
    """What `_copy_keys` does, by ordinary loads: for operands that bulk copies cannot read."""
    keys.wait_empty(i)
    n = n0 + gl.arange(0, TILE, layout=LOAD_ROW)
    inside = (n >= block.start) & (n < block.end)
    for c in gl.static_range(CHAINS):
        d = c * (D // CHAINS) + gl.arange(0, D // CHAINS, layout=LOAD_COLUMN)
        x = gl.load(k + (n.to(gl.int64) * k_step)[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        keys.slots.index(i % keys.depth).slice(c * (D // CHAINS), D // CHAINS, 1).store(x)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(keys.full.index(i % keys.depth), count=1)


@gluon.jit
def _fetch_norms(v: Values, n0, block: Block, variant: Variant):
    """A tile's norms: those of the program's own columns, and of the whole rows (one or two blocks) in every
    warp.
    """
    own = gl.full([TILE], 1.0, gl.float32, layout=LOAD_ROW)
    low = gl.full([TILE], 1.0, gl.float32, layout=EACH_LOADING_WARP)
    high = low
    if variant.FORM == "codes":
        own = _norms(v, n0, block.column // COLUMNS, block, LOAD_ROW)
        low = _norms(v, n0, 0, block, EACH_LOADING_WARP)
        high = low
        if variant.D == 512:
            high = _norms(v, n0, 1, block, EACH_LOADING_WARP)
    return own, low, high


@gluon.jit
def _has_unknown_exponent(norms, n0, spread, sf, block: Block, D: gl.constexpr):
    """Whether some row is empty, or its `_exponent` may be another than 0. A row's largest magnitude lies
    between the codebook's least and largest magnitude times w, and mostly that is enough to know.
    """
    least, most = spread
    w = _weight(gl.maximum(gl.abs(norms[1]), gl.abs(norms[2])), sf, D)
    n = n0 + gl.arange(0, TILE, layout=EACH_LOADING_WARP)
    known = (w * least >= 0.0009765625) & (w * most < 64.0) | (n < block.start) | (n >= block.end)
    return gl.min(known.to(gl.int32), 0) == 0


@gluon.jit
def _largest_of_rows(v: Values, n0, lookup, keep, block: Block, variant: Variant):
    """The largest magnitude of whole rows, read for the purpose; 0 of rows that are not kept."""
    largest = gl.zeros([TILE], gl.float32, layout=LOAD_ROW)
    w = largest
    for c in range(variant.D // CHUNK):
        if variant.FORM == "codes":
            w = _weight(_norms(v, n0, c // 4, block, LOAD_ROW), v.sf, variant.D)
        x = _widen(_fetch(v, n0, c * CHUNK, block, variant), lookup, w, variant)
        largest = gl.maximum(largest, gl.max(gl.abs(x), 1))
    return gl.where(keep, largest, 0.0)
