"""The attention kernel for Hopper (sm90), in Gluon: head dims 256 and 512.

One program attends 128 packed query rows (the query heads of a KV head share its tiles) over 64-key tiles
that lie at absolute keys, for 256 columns of V. Two warpgroups of consumers own 64 rows each; K and V reach
them through rings of shared memory, filled by one warp of bulk tensor copies (`copy_tiles`) or, where V must
be converted on the way or an operand cannot be copied in bulk, by eight loading warps (`load_tiles`).

Hopper's matrix unit truncates when it accumulates, so nothing stays in its accumulators for longer than one
tile: every P.V product starts fresh and is added to the running output in float32. Numbers are kept exact or
nearly so by what surrounds it:

* Q.K: four fresh accumulators, each over a quarter of D, added in float32.
* The exponential's base is an integer (the row maximum rounded up), so that every rescaling, within a split
  and between splits, is by a power of two and exact.
* P is scaled by 2^15 and split into two float16 terms; float16 V is exact.
* Any other V is split into two float16 terms as well. Each key's row is first scaled by a power of two that
  depends on that row alone (`hopper_load`); the key's weights carry the inverse.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from warmattn.backend.cuda.hopper_load import copy_tiles, load_tiles, make_table
from warmattn.backend.cuda.hopper_tiles import (
    ACC,
    CHAINS,
    CHUNK,
    CHUNKS,
    COLUMN,
    COLUMNS,
    EACH_WARP,
    P_BITS,
    P_UNIT,
    QUERIES,
    ROW,
    ROWS,
    SHARED,
    TILE,
    WEIGHTS,
    Block,
    Mask,
    Ring,
    Values,
    Variant,
    make_ring,
    mask_kind,
)
from warmattn.backend.cuda.profiling import metadata

__all__ = ["attend"]


@gluon.jit
def _product(q, k, a, c: gl.constexpr, D: gl.constexpr):
    zero = gl.zeros([64, TILE], gl.float32, layout=ACC)
    keys = k.slice(c * (D // CHAINS), D // CHAINS, 1)
    return warpgroup_mma(q.index(a + c), keys.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _scores(q, k, a, D: gl.constexpr, TWO_IN_FLIGHT: gl.constexpr):
    """q @ k.T of one tile: four fresh accumulators over D/4 columns each, added in float32 in this order."""
    s = _product(q, k, a, 0, D)
    if TWO_IN_FLIGHT:
        t = _product(q, k, a, 1, D)
        s = warpgroup_mma_wait(1, deps=[s])
        u = _product(q, k, a, 2, D)
        t = warpgroup_mma_wait(1, deps=[t])
        s = s + t
        t = _product(q, k, a, 3, D)
        u = warpgroup_mma_wait(1, deps=[u])
        s = s + u
        t = warpgroup_mma_wait(0, deps=[t])
        s = s + t
    else:
        s = warpgroup_mma_wait(0, deps=[s])
        for c in gl.static_range(1, CHAINS):
            t = _product(q, k, a, c, D)
            t = warpgroup_mma_wait(0, deps=[t])
            s = s + t
    return s


@gluon.jit
def _tanh(x):
    """Cephes' tanhf: a polynomial near 0, where 1 - exp would cancel."""
    z = x * x
    near = gl.fma(z, z * 0 - 5.70498872745e-3, 2.06390887954e-2)
    near = gl.fma(z, near, -5.37397155531e-2)
    near = gl.fma(z, near, 1.33314422036e-1)
    near = gl.fma(z, near, -3.33332819422e-1)
    near = gl.fma(near * z, x, x)
    e = gl.exp2(gl.abs(x) * -2.885390081777927)
    far = gl.div_rn(1.0 - e, 1.0 + e)
    return gl.where(gl.abs(x) < 0.625, near, gl.where(x < 0, -far, far))


@gluon.jit
def _hide(s, n0, mask: Mask, row_at, in_call, first_row, last_row, end, variant: Variant):
    """Add the mask's cells to the scores of one tile; a hidden cell gives -inf."""
    kind = 1
    if variant.MAP:
        kind = mask_kind(mask, first_row, last_row, n0, 4)
    if kind == 0:
        s = gl.full_like(s, float("-inf"))
    elif kind == 1:
        n = n0 + gl.arange(0, TILE, layout=COLUMN)
        inside = in_call[:, None] & (n < end)[None, :]
        at = row_at[:, None] + (n.to(gl.int64) * mask.step)[None, :]
        cells = gl.load(mask.cells + at, mask=inside, other=0)
        if mask.cells.dtype.element_ty == gl.float16:
            cells = cells.to(gl.float32)
            s = gl.where(cells > -1e30, gl.fma(cells, gl.full_like(s, mask.inverse_scale), s), float("-inf"))
        else:
            s = gl.where(cells != 0, s, float("-inf"))
    return s


@gluon.jit
def _weigh(s, base, scaled_base, total, uneven, factor, exponents, CONVERTED: gl.constexpr):
    """Streaming softmax of one tile: weights as two float16 terms, what the past is rescaled by, and the new
    bases and sum. A weight is ``2 ** (factor * s - base)``, at most 2^15; times V's scaled rows goes the same
    weight times 2^e, counted from a base of its own. Rows of zeros have e = -inf, and no part in that base.
    """
    factor_tile = gl.full_like(s, factor)
    new = gl.maximum(base, gl.ceil(gl.max(s, 1) * gl.full_like(base, factor)) - P_BITS)
    shift = gl.where(new == float("-inf"), 0.0, new)
    p = gl.exp2(gl.fma(s, factor_tile, gl.zeros_like(s) - shift[:, None]))
    rescale = gl.exp2(base - shift)
    total = gl.fma(total, rescale, gl.sum(p, 1))
    new_scaled = new
    if CONVERTED:
        # While all exponents have been 0, both bases are one, and so are both weights.
        uneven = uneven | (gl.max(gl.abs(exponents.load(EACH_WARP)), 0) != 0.0).to(gl.int32)
        if uneven != 0:
            e = exponents.load(COLUMN)
            top = gl.max(gl.fma(s, factor_tile, gl.zeros_like(s) + e[None, :]), 1)
            new_scaled = gl.maximum(scaled_base, gl.ceil(top) - P_BITS)
            scaled_shift = gl.where(new_scaled == float("-inf"), 0.0, new_scaled)
            p = gl.exp2(gl.fma(s, factor_tile, gl.zeros_like(s) + e[None, :] - scaled_shift[:, None]))
            rescale = gl.exp2(scaled_base - scaled_shift)
    high = p.to(gl.float16)
    low = (p - high.to(gl.float32)).to(gl.float16)
    high = gl.convert_layout(high, WEIGHTS)
    low = gl.convert_layout(low, WEIGHTS)
    return high, low, rescale, new, new_scaled, total, uneven


@gluon.jit
def _weighted(high, low, chunks: Ring, use, variant: Variant):
    """One 64-column chunk of P @ V in a fresh accumulator, in flight; smallest terms first."""
    zero = gl.zeros([64, CHUNK], gl.float32, layout=ACC)
    chunks.wait_full(use)
    if not variant.BULK_V:
        fence_async_shared()  # here, since in the loaders it would wait for the loads they have in flight
    slot = use % chunks.depth
    v = chunks.slots.index(slot)
    if variant.CONVERTED:
        t = warpgroup_mma(high, chunks.low.index(slot), zero, use_acc=False, is_async=True)
        t = warpgroup_mma(low, v, t, is_async=True)
    else:
        t = warpgroup_mma(low, v, zero, use_acc=False, is_async=True)
    return warpgroup_mma(high, v, t, is_async=True)


@gluon.jit
def _add(a, rescale, t):
    return gl.fma(a, gl.zeros_like(a) + rescale[:, None], t)


@gluon.jit
def _power_of_two(x):
    """2 ** x of an integral x < 128, exact down to the smallest subnormal; -inf gives 0."""
    n = gl.maximum(x, -252.0).to(gl.int32)
    near = gl.maximum(n, -126)
    a = ((near + 127) << 23).to(gl.float32, bitcast=True)
    b = ((n - near + 127) << 23).to(gl.float32, bitcast=True)
    return gl.where(x < -252.0, 0.0, a * b)


@gluon.jit
def _store_part(pointer, a, scale, inside, column):
    d = column + gl.arange(0, CHUNK, layout=COLUMN)
    gl.store(pointer[:, None] + d[None, :], a * scale[:, None], mask=inside[:, None])


@gluon.jit
def _fold_into(pointer, a, b, scale, weights, divisor, is_first, is_last, inside, column):
    """Merge two chunks of a split's accumulator into the running total that ``out`` holds; after the last
    split, divide.
    """
    weight_before, weight = weights
    here = pointer[:, None] + (column + gl.arange(0, CHUNK, layout=COLUMN))[None, :]
    a = a * scale[:, None]
    b = b * scale[:, None]
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
def _consume(
    W: gl.constexpr, q, keys: Ring, chunks: Ring, exponents, block: Block, outputs, mask: Mask, scaling,
    variant: Variant,
):  # fmt: skip
    """A consuming warpgroup: rows ``64 * W ...`` of the block, if there are such, over all of its tiles."""
    if block.row0 + W * 64 < block.rows * block.group:
        _attend_rows(W, q, keys, chunks, exponents, block, outputs, mask, scaling, variant)
    else:
        for i in range(block.tiles):
            keys.wait_full(i)
            keys.release(i)
            for c in gl.static_range(CHUNKS):
                chunks.wait_full(i * CHUNKS + c)
                chunks.release(i * CHUNKS + c)


@gluon.jit
def _attend_rows(
    W: gl.constexpr, q, keys: Ring, chunks: Ring, exponents, block: Block, outputs, mask: Mask, scaling,
    variant: Variant,
):  # fmt: skip
    """Rows ``64 * W ...`` of the block over all of its tiles: softmax, products and results."""
    out, out_head, out_row, sums, maxima, unscale = outputs
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
    if variant.CAUSAL:
        last = gl.minimum(last, block.last0 + row)
        all_to = gl.minimum(all_to, block.last0 + first_row + 1)
    if variant.WINDOW:
        first = gl.maximum(first, block.first0 + row)
        all_from = gl.maximum(all_from, block.first0 + last_row)
    mask_at = head.to(gl.int64) * mask.head + row.to(gl.int64) * mask.row
    out_at = out + head.to(gl.int64) * out_head + row.to(gl.int64) * out_row

    row_index = head.to(gl.int64) * block.rows + row
    writes_row = in_call & (block.column == 0)
    all_base = gl.full([64], float("-inf"), gl.float32, layout=ROW)
    all_total = gl.zeros([64], gl.float32, layout=ROW)
    tile = block.tile0
    end_tile = block.tile0 + block.tiles
    splits = 1
    if variant.WALK:
        splits = gl.maximum((end_tile * TILE - 1) // variant.SPLIT - tile * TILE // variant.SPLIT + 1, 1)
    for _ in range(splits):
        stop = end_tile
        if variant.WALK:
            stop = gl.minimum(end_tile, (tile * TILE // variant.SPLIT + 1) * (variant.SPLIT // TILE))
        base = gl.full([64], float("-inf"), gl.float32, layout=ROW)
        scaled_base = base
        total = gl.zeros([64], gl.float32, layout=ROW)
        uneven = gl.to_tensor(0)
        a0 = gl.zeros([64, CHUNK], gl.float32, layout=ACC)
        a1 = gl.zeros([64, CHUNK], gl.float32, layout=ACC)
        a2 = gl.zeros([64, CHUNK], gl.float32, layout=ACC)
        a3 = gl.zeros([64, CHUNK], gl.float32, layout=ACC)
        for t in range(tile, stop):
            i = t - block.tile0
            n0 = t * TILE
            # An opaque zero: through indices it can follow, ptxas hoists matrix descriptors, and spills.
            opaque = gl.inline_asm_elementwise(
                "{ .reg .u32 t; mov.u32 t, %clock_hi; shr.u32 $0, t, 31; }", "=r,r", [i], dtype=gl.int32,
                is_pure=False, pack=1
            )  # fmt: skip
            keys.wait_full(i)
            slot = i % keys.depth + opaque
            s = _scores(q, keys.slots.index(slot), W * CHAINS + opaque, variant.D, not variant.CONVERTED)
            keys.release(i)
            if variant.SOFTCAP:
                s = cap_out * _tanh(s * cap_in)
            if variant.MASK:
                s = _hide(s, n0, mask, mask_at, in_call, first_row, last_row, block.end, variant)
            if (n0 < all_from) | (n0 + TILE > all_to):
                n = n0 + gl.arange(0, TILE, layout=COLUMN)
                seen = (n[None, :] >= first[:, None]) & (n[None, :] <= last[:, None])
                s = gl.where(seen, s, float("-inf"))
            use = (i + opaque) * CHUNKS
            if variant.CONVERTED:
                chunks.wait_full(use)  # the loaders post a tile's exponents before its first chunk
            high, low, rescale, base, scaled_base, total, uneven = _weigh(
                s, base, scaled_base, total, uneven, factor, exponents.index(i & 1), variant.CONVERTED
            )
            t0 = _weighted(high, low, chunks, use, variant)
            if variant.CONVERTED:
                t0 = warpgroup_mma_wait(0, deps=[t0])
                chunks.release(use)
                a0 = _add(a0, rescale, t0)
                t1 = _weighted(high, low, chunks, use + 1, variant)
                t1 = warpgroup_mma_wait(0, deps=[t1])
                chunks.release(use + 1)
                a1 = _add(a1, rescale, t1)
                t2 = _weighted(high, low, chunks, use + 2, variant)
                t2 = warpgroup_mma_wait(0, deps=[t2])
                chunks.release(use + 2)
                a2 = _add(a2, rescale, t2)
                t3 = _weighted(high, low, chunks, use + 3, variant)
            else:
                t1 = _weighted(high, low, chunks, use + 1, variant)
                t0 = warpgroup_mma_wait(2, deps=[t0])
                chunks.release(use)
                a0 = _add(a0, rescale, t0)
                t2 = _weighted(high, low, chunks, use + 2, variant)
                t1 = warpgroup_mma_wait(2, deps=[t1])
                chunks.release(use + 1)
                a1 = _add(a1, rescale, t1)
                t3 = _weighted(high, low, chunks, use + 3, variant)
                t2 = warpgroup_mma_wait(2, deps=[t2])
                chunks.release(use + 2)
                a2 = _add(a2, rescale, t2)
            t3 = warpgroup_mma_wait(0, deps=[t3])
            chunks.release(use + 3)
            a3 = _add(a3, rescale, t3)

        # From here on weights are at most 1, of the sum and of the accumulators alike.
        lift = gl.full_like(base, unscale)
        if variant.CONVERTED:
            lift = lift * _power_of_two(gl.where(base > float("-inf"), scaled_base - base, 0.0))
        total = total * P_UNIT
        base = base + P_BITS
        if variant.WALK:
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
            _fold_into(out_at, a0, a1, lift, weights, divisor, first_split, last_split, in_call, column)
            column += 2 * CHUNK
            _fold_into(out_at, a2, a3, lift, weights, divisor, first_split, last_split, in_call, column)
            tile = stop
        else:
            part = out + row_index * variant.D
            _store_part(part, a0, lift, in_call, block.column)
            _store_part(part, a1, lift, in_call, block.column + CHUNK)
            _store_part(part, a2, lift, in_call, block.column + 2 * CHUNK)
            _store_part(part, a3, lift, in_call, block.column + 3 * CHUNK)
            all_base = base
            all_total = total
    gl.store(maxima + row_index, all_base, mask=writes_row)
    gl.store(sums + row_index, all_total, mask=writes_row)


@gluon.jit(
    launch_metadata=metadata,
    do_not_specialize=[
        "q_batch", "q_head", "q_row", "k_batch", "k_head", "k_step", "v_batch", "v_head", "v_step",
        "norm_batch", "norm_head", "norm_row", "norm_step", "code_mask", "sf",
        "mask_batch", "mask_head", "mask_row", "mask_step", "inverse_scale", "map_columns",
        "out_batch", "out_head", "out_row", "unscale", "q_offset", "kv_len", "kv_start", "key_offset",
        "window", "H", "Hk", "S", "capacity", "factor", "cap_in", "cap_out", "first_split", "batch_size",
    ]
)  # fmt: skip
def attend(
    q, q_batch: gl.int64, q_head: gl.int64, q_row: gl.int64,
    k, k_batch: gl.int64, k_head: gl.int64, k_step: gl.int64,
    v, v_batch: gl.int64, v_head: gl.int64, v_step: gl.int64,
    norms, norm_batch: gl.int64, norm_head: gl.int64, norm_row: gl.int64, norm_step: gl.int64,
    centroids, code_mask, sf,
    mask, mask_batch: gl.int64, mask_head: gl.int64, mask_row: gl.int64, mask_step: gl.int64, inverse_scale,
    tile_map, map_columns,
    out, out_batch: gl.int64, out_head: gl.int64, out_row: gl.int64, maxima, sums, unscale,
    q_offsets, kv_lens, kv_starts, q_offset, kv_len, kv_start, key_offset, window,
    H, Hk, S, capacity, factor, cap_in, cap_out, first_split, batch_size,
    D: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASK: gl.constexpr, MAP: gl.constexpr,
    SOFTCAP: gl.constexpr, LENGTHS: gl.constexpr, FORM: gl.constexpr, BULK_K: gl.constexpr,
    BULK_V: gl.constexpr, V_ALIGNED: gl.constexpr, OUT_ALIGNED: gl.constexpr, WALK: gl.constexpr,
    SPLIT: gl.constexpr, K_STAGES: gl.constexpr, V_SLOTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attention of packed rows. Grid: (B * Hk * D / 256, tiles of rows, 1 or splits).

    WALK: one program folds all splits of its rows into ``out``; else each writes its split's partial results,
    ``out [splits, B, H, S, D]``, and ``maxima`` and ``sums [splits, B, H, S]``.
    """
    HALVES: gl.constexpr = D // COLUMNS
    variant = Variant(D, CAUSAL, WINDOW, MASK, MAP, SOFTCAP, FORM, BULK_K, BULK_V, V_ALIGNED, WALK, SPLIT)
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
    if LENGTHS:  # on the device where there is an address
        q_offset = gl.load(q_offsets + b, mask=q_offsets.to(gl.int64) != 0, other=q_offset)
        kv_len = gl.load(kv_lens + b, mask=kv_lens.to(gl.int64) != 0, other=kv_len)
        kv_start = gl.load(kv_starts + b, mask=kv_starts.to(gl.int64) != 0, other=kv_start)
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
    column = (gl.program_id(0) % HALVES) * COLUMNS
    block = Block(b, kv_head, column, row0, S, group, first0, last0, start, end, tile0, tiles)

    k += b.to(gl.int64) * k_batch + kv_head.to(gl.int64) * k_head
    v += b.to(gl.int64) * v_batch + kv_head.to(gl.int64) * v_head
    rows_before = (split * batch_size + b).to(gl.int64) * H * S
    if WALK:
        out += b.to(gl.int64) * out_batch
    else:
        out += rows_before * D
    outputs = (out, out_head, out_row, sums + rows_before, maxima + rows_before, unscale)
    mask += b.to(gl.int64) * mask_batch
    external = Mask(mask, mask_head, mask_row, mask_step, inverse_scale, tile_map, map_columns)
    scaling = (factor, cap_in, cap_out)

    q_slots = gl.allocate_shared_memory(q.dtype.element_ty, [2 * CHAINS, 64, D // CHAINS], SHARED)
    k_slots = gl.allocate_shared_memory(q.dtype.element_ty, [K_STAGES, TILE, D], SHARED)
    v_slots = gl.allocate_shared_memory(gl.float16, [V_SLOTS, TILE, CHUNK], SHARED)
    v_low = v_slots
    if variant.CONVERTED:
        v_low = gl.allocate_shared_memory(gl.float16, [V_SLOTS, TILE, CHUNK], SHARED)
    exponents = gl.allocate_shared_memory(gl.float32, [2, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    keys = make_ring(k_slots, k_slots, K_STAGES)
    chunks = make_ring(v_slots, v_low, V_SLOTS)
    lookup = gl.to_tensor(0)
    if FORM == "codes":
        norms += b.to(gl.int64) * norm_batch + kv_head.to(gl.int64) * norm_head
        lookup = make_table(centroids, code_mask, variant.COPIES)

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
    keys_seen = gl.maximum(end - start, 1)
    bulk_k = k
    bulk_v = v
    if BULK_K:
        here = k + start.to(gl.int64) * k_step
        bulk_k = tma.make_tensor_descriptor(here, [keys_seen, D], [k_step, 1], [TILE, D], SHARED)
    if BULK_V:
        here = v + start.to(gl.int64) * v_step
        bulk_v = tma.make_tensor_descriptor(here, [keys_seen, D], [v_step, 1], [TILE, CHUNK], SHARED)
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    consumed = (q_slots, keys, chunks, exponents, block, outputs, external, scaling, variant)
    if BULK_V:
        gl.warp_specialize(
            [
                (_consume, (W0,) + consumed),
                (_consume, (W1,) + consumed),
                (copy_tiles, (bulk_k, bulk_v, keys, chunks, block, variant)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, LOADER_REGISTERS],
        )
    else:
        source = Values(v, v_step, norms, norm_row, norm_step, sf, lookup, centroids, code_mask)
        loaded = (bulk_k, k_step, source, keys, chunks, exponents, block, external, variant)
        gl.warp_specialize(
            [
                (_consume, (W0,) + consumed),
                (_consume, (W1,) + consumed),
                (load_tiles, loaded),
            ],
            [4, 8],
            [CONSUMER_REGISTERS, LOADER_REGISTERS],
        )
