"""The attention kernel for every GPU that Triton knows: head dims 64, 128, 256 and 512.

One program attends ``ROWS`` packed query rows (the query heads of a KV head share its tiles) over key tiles
that lie at absolute keys, for ``COLUMNS`` columns of V. It takes the run-time arguments of `hopper.attend`
and computes by the same rules, which that module explains: fresh accumulators for every product of a tile,
integer bases, P and all but float16 V as two float16 terms, rows of V scaled by a power of two of their own.
Triton's interpreter runs it too; Gluon has none.
"""

# In a kernel, Triton gives annotations, constants and loops a meaning of its own.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import triton
import triton.language as tl

from warmattn.backend.cuda.merge import power_of_two
from warmattn.backend.cuda.profiling import metadata

__all__ = ["attend"]

CHUNK = tl.constexpr(64)
"""Columns of V that are multiplied at a time."""
NORM_BLOCK = tl.constexpr(256)
"""Columns of V that one norm is for."""

P_BITS = tl.constexpr(15.0)
"""P is at most 2^15, within float16's range."""
P_UNIT = tl.constexpr(2.0**-15)
"""Undoes that."""
V_BITS = tl.constexpr(8)
"""A converted row of V with exponent 0 is scaled by 2^8."""


@triton.jit
def _tanh(x):
    """Cephes' tanhf: a polynomial near 0, where 1 - exp would cancel."""
    z = x * x
    near = tl.fma(z, -5.70498872745e-3, 2.06390887954e-2)
    near = tl.fma(z, near, -5.37397155531e-2)
    near = tl.fma(z, near, 1.33314422036e-1)
    near = tl.fma(z, near, -3.33332819422e-1)
    near = tl.fma(near * z, x, x)
    e = tl.exp2(tl.abs(x) * -2.885390081777927)
    far = tl.div_rn(1.0 - e, 1.0 + e)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def _exponent(largest):
    """The power of two, by its exponent, that a row of V with this largest magnitude is divided by."""
    e = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    # floor((e - 127 + 10) / 16) * 16 of a number >= -117, by a shift of a non-negative one
    e = (((e + 11) >> 4) << 4) - 128
    return tl.where(largest == 0.0, 0, tl.minimum(tl.maximum(e, -96), 120))


@triton.jit
def _mask_kind(
    tile_map, map_columns, first_row, last_row, n0, ROWS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """What the map says of the tile for all of the rows together: 0 hidden, 1 mixed, 2 open."""
    ACROSS: tl.constexpr = TILE // 16
    i = tl.arange(0, max(ROWS // 32, 2) * ACROSS)
    row = first_row // 32 + i // ACROSS
    column = n0 // 16 + i % ACROSS
    inside = (row <= last_row // 32) & (column < map_columns)
    kind = tl.load(tile_map + row.to(tl.int64) * map_columns + column, mask=inside, other=3).to(tl.int32)
    low = tl.min(kind, 0)
    high = tl.max(tl.where(inside, kind, 0), 0)
    return tl.where(high == 0, 0, tl.where(low >= 2, 2, 1))


@triton.jit
def _hide(s, seen, mask, at, n, step, inverse_scale):
    """Add the mask's cells to the scores of one tile; and whether its rows still see its keys."""
    cells = tl.load(mask + at[:, None] + (n.to(tl.int64) * step)[None, :], mask=seen, other=0)
    if mask.dtype.element_ty == tl.float16:
        seen = seen & (cells > float("-inf"))  # of float16, nothing else is at or below -1e30
        s = tl.fma(cells.to(tl.float32), inverse_scale, s)
    else:
        seen = seen & (cells != 0)
    return s, seen


@triton.jit
def _queries(q, at, in_call, D: tl.constexpr, CHAIN: tl.constexpr):
    """The rows of Q in chains of ``CHAIN`` columns."""
    queries = ()
    for c in tl.static_range(D // CHAIN):
        d = c * CHAIN + tl.arange(0, CHAIN)
        queries = queries + (tl.load(q + at[:, None] + d[None, :], mask=in_call[:, None], other=0.0),)
    return queries


@triton.jit
def _product(queries, k, keep, c, CHAIN: tl.constexpr):
    """One chain of q @ k.T in a fresh accumulator. ``k [TILE, 1]``: addresses of the rows of the tile."""
    d = c * CHAIN + tl.arange(0, CHAIN)
    keys = tl.load(k + d[None, :], mask=keep[:, None], other=0.0)
    return tl.dot(queries[c], tl.trans(keys))


@triton.jit
def _scores(queries, k, keep, D: tl.constexpr, CHAIN: tl.constexpr):
    """q @ k.T of one tile: chains added in float32 in ascending order."""
    s = _product(queries, k, keep, 0, CHAIN)
    for c in tl.static_range(1, D // CHAIN):
        # A sum that Triton does not recognise: it would go on in the accumulator.
        s = tl.fma(_product(queries, k, keep, c, CHAIN), 1.0, s)
    return s


@triton.jit
def _norm_weight(norms, n, keep, block, row, step, sf, D: tl.constexpr):
    """fl32(norm * 1/sqrt(D)), or fl32(norm / sf) of one 256-column block; rows outside give 0."""
    norm = tl.load(norms + n.to(tl.int64) * row + block * step, mask=keep, other=0.0)
    if D == 512:
        w = tl.div_rn(norm, tl.zeros_like(norm) + sf)
    else:
        w = norm * (D**-0.5)
    return w


@triton.jit
def _values(
    v, n, keep, column, v_step, w, table, TILE: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Columns of V, ``[TILE, WIDTH]``; float16 as it is, others in float32. Codes: ``fl(centroid * w)``."""
    d = column + tl.arange(0, WIDTH)
    x = tl.load(v + (n.to(tl.int64) * v_step)[:, None] + d[None, :], mask=keep[:, None], other=0)
    if FORM == "codes":
        code = tl.reshape(x.to(tl.int32), (TILE * WIDTH,))
        x = tl.reshape(tl.gather(table, code, 0), (TILE, WIDTH)) * w[:, None]
    elif FORM == "f32":
        x = x.to(tl.float32)
    return x


@triton.jit
def _exponents(
    v, n, keep, v_step, norms, norm_row, norm_step, sf, table, spread,
    D: tl.constexpr, TILE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """`_exponent` of each row of V, float32 ``[TILE]``; -inf of rows of zeros."""
    WIDTH: tl.constexpr = min(D, 128)
    w = tl.zeros([TILE], tl.float32)
    if FORM == "codes":
        least, most = spread
        # The largest magnitude of a row lies between the codebook's least and largest magnitude times w, and
        # mostly that is enough to know that its exponent is 0.
        top = tl.abs(_norm_weight(norms, n, keep, 0, norm_row, norm_step, sf, D))
        if D > NORM_BLOCK:
            top = tl.maximum(top, tl.abs(_norm_weight(norms, n, keep, 1, norm_row, norm_step, sf, D)))
        known = ((top * least >= 0.0009765625) & (top * most < 64.0)) | ~keep
        unknown = tl.min(known.to(tl.int32), 0) == 0
    else:
        unknown = True
    e = tl.zeros([TILE], tl.float32)
    if unknown:
        largest = tl.zeros([TILE], tl.float32)
        for c in range(D // WIDTH):  # not unrolled: it would take registers for all of the row at once
            if FORM == "codes":
                w = _norm_weight(norms, n, keep, c * WIDTH // NORM_BLOCK, norm_row, norm_step, sf, D)
            x = _values(v, n, keep, c * WIDTH, v_step, w, table, TILE, WIDTH, FORM)
            largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
        e = tl.where(largest == 0.0, float("-inf"), _exponent(largest).to(tl.float32))
    return e


@triton.jit
def _weigh(s, e, base, scaled_base, total, factor, CONVERTED: tl.constexpr):
    """Streaming softmax of one tile: weights as two float16 terms, what the past is rescaled by, and the new
    bases and sum. A weight is ``2 ** (factor * s - base)``, at most 2^15; times V's scaled rows goes the same
    weight times 2^e, counted from a base of its own. Rows of zeros have e = -inf, and no part in that base.
    """
    new = tl.maximum(base, tl.ceil(tl.max(s, 1) * factor) - P_BITS)
    shift = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(tl.fma(s, factor, -shift[:, None]))
    rescale = tl.exp2(base - shift)
    total = tl.fma(total, rescale, tl.sum(p, 1))
    new_scaled = new
    if CONVERTED:
        top = tl.max(tl.fma(s, factor, e[None, :]), 1)
        new_scaled = tl.maximum(scaled_base, tl.ceil(top) - P_BITS)
        scaled_shift = tl.where(new_scaled == float("-inf"), 0.0, new_scaled)
        p = tl.exp2(tl.fma(s, factor, e[None, :] - scaled_shift[:, None]))
        rescale = tl.exp2(scaled_base - scaled_shift)
    high = p.to(tl.float16)
    low = (p - high.to(tl.float32)).to(tl.float16)
    return high, low, rescale, new, new_scaled, total


@triton.jit
def _add_weighted(
    accumulators, rescale, high, low, e, v, n, keep, column, v_step, w, table,
    TILE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Rescale the accumulators and add P @ V of one tile, by chunks from fresh ones; smallest terms first."""
    scale = power_of_two(tl.where(e == float("-inf"), 0.0, -e) + V_BITS)
    added = ()
    for c in tl.static_range(len(accumulators)):
        x = _values(v, n, keep, column + c * CHUNK, v_step, w, table, TILE, CHUNK, FORM)
        if FORM == "f16":
            t = tl.dot(low, x)
            t = tl.dot(high, x, acc=t)
        else:
            x = x * scale[:, None]
            x_high = x.to(tl.float16)
            x_low = (x - x_high.to(tl.float32)).to(tl.float16)
            t = tl.dot(high, x_low)
            t = tl.dot(low, x_high, acc=t)
            t = tl.dot(high, x_high, acc=t)
        added = added + (tl.fma(accumulators[c], rescale[:, None], t),)
    return added


@triton.jit
def _divide(a, inverse, divisor):
    """Markstein's correctly rounded division (1990), with the reciprocal shared by the row."""
    quotient = a * inverse[:, None]
    return tl.fma(tl.fma(-quotient, divisor[:, None], a), inverse[:, None], quotient)


@triton.jit(
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
    q, q_batch: tl.int64, q_head: tl.int64, q_row: tl.int64,
    k, k_batch: tl.int64, k_head: tl.int64, k_step: tl.int64,
    v, v_batch: tl.int64, v_head: tl.int64, v_step: tl.int64,
    norms, norm_batch: tl.int64, norm_head: tl.int64, norm_row: tl.int64, norm_step: tl.int64,
    centroids, code_mask, sf,
    mask, mask_batch: tl.int64, mask_head: tl.int64, mask_row: tl.int64, mask_step: tl.int64, inverse_scale,
    tile_map, map_columns,
    out, out_batch: tl.int64, out_head: tl.int64, out_row: tl.int64, maxima, sums, unscale,
    q_offsets, kv_lens, kv_starts, q_offset, kv_len, kv_start, key_offset, window,
    H, Hk, S, capacity, factor, cap_in, cap_out, first_split, batch_size,
    D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, MAP: tl.constexpr,
    SOFTCAP: tl.constexpr, LENGTHS: tl.constexpr, FORM: tl.constexpr, QK_ALIGNED: tl.constexpr,
    V_ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr, WALK: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Attention of packed rows. Grid: (B * Hk * D / COLUMNS, tiles of rows, 1 or splits).

    WALK: one program folds all splits of its rows into ``out``; else each writes its split's partial results,
    ``out [splits, B, H, S, D]``, and ``maxima`` and ``sums [splits, B, H, S]``.
    """
    CHAIN: tl.constexpr = max(D // 4, 32)
    CHUNKS: tl.constexpr = COLUMNS // CHUNK
    CONVERTED: tl.constexpr = FORM != "f16"
    if QK_ALIGNED:  # strides come in units of 16 bytes then
        k_step = k_step * 8
        q_batch, q_head, q_row = q_batch * 8, q_head * 8, q_row * 8
    if V_ALIGNED:
        UNIT: tl.constexpr = 128 // v.dtype.element_ty.primitive_bitwidth
        v_batch, v_head, v_step = v_batch * UNIT, v_head * UNIT, v_step * UNIT
    if OUT_ALIGNED:
        out_batch, out_head, out_row = out_batch * 2, out_head * 2, out_row * 2
    group = H // Hk
    head = tl.program_id(0) // (D // COLUMNS)
    column = tl.program_id(0) % (D // COLUMNS) * COLUMNS
    b = head // Hk
    kv_head = head % Hk
    row0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS

    # Row i sees the keys [first0 + i, last0 + i] of [start, end).
    if LENGTHS:  # on the device where there is an address
        q_offset = tl.load(q_offsets + b, mask=q_offsets.to(tl.int64) != 0, other=q_offset)
        kv_len = tl.load(kv_lens + b, mask=kv_lens.to(tl.int64) != 0, other=kv_len)
        kv_start = tl.load(kv_starts + b, mask=kv_starts.to(tl.int64) != 0, other=kv_start)
    end = tl.minimum(tl.maximum(kv_len, 0), capacity)
    start = tl.minimum(tl.maximum(kv_start, 0), end)
    packed = row0 + tl.arange(0, ROWS)
    row = packed // group
    in_call = row < S
    first_row = row0 // group
    last_row = tl.minimum((row0 + ROWS - 1) // group, S - 1)
    first = tl.zeros_like(row) + start
    last = tl.zeros_like(row) + end - 1
    from_key = start
    to_key = end
    if CAUSAL:
        position = q_offset.to(tl.int64) - key_offset
        last0 = tl.minimum(tl.maximum(position, 0 - S), capacity).to(tl.int32)
        last = tl.minimum(last, last0 + row)
        to_key = tl.minimum(to_key, last0 + last_row + 1)
        if WINDOW:
            first0 = tl.minimum(tl.maximum(position - window + 1, 0 - S), capacity).to(tl.int32)
            first = tl.maximum(first, first0 + row)
            from_key = tl.maximum(from_key, first0 + first_row)
    last = tl.where(in_call, last, -1)  # rows past S see nothing
    seen_from = from_key
    seen_to = to_key
    split = 0
    if not WALK:
        split = tl.program_id(2)
        from_key = tl.maximum(from_key, (first_split + split) * SPLIT)
        to_key = tl.minimum(to_key, (first_split + split + 1) * SPLIT)
    tile0 = from_key // TILE
    end_tile = tl.where(to_key > from_key, (to_key + TILE - 1) // TILE, tile0)

    q_head_of_row = (kv_head * group + packed % group).to(tl.int64)
    row = row.to(tl.int64)
    queries = _queries(q + b.to(tl.int64) * q_batch, q_head_of_row * q_head + row * q_row, in_call, D, CHAIN)
    k += b.to(tl.int64) * k_batch + kv_head.to(tl.int64) * k_head
    if QK_ALIGNED:
        k = tl.multiple_of(k, [16])
    v += b.to(tl.int64) * v_batch + kv_head.to(tl.int64) * v_head
    mask_at = b.to(tl.int64) * mask_batch + q_head_of_row * mask_head + row * mask_row
    table = 0
    spread = (0.0, 0.0)
    if FORM == "codes":
        norms += b.to(tl.int64) * norm_batch + kv_head.to(tl.int64) * norm_head
        table = tl.load(centroids + (tl.arange(0, 256) & code_mask))
        spread = (tl.min(tl.abs(table), 0), tl.max(tl.abs(table), 0))
    row_index = ((split * batch_size + b).to(tl.int64) * H + q_head_of_row) * S + row
    if WALK:
        out_at = out + (b.to(tl.int64) * out_batch + q_head_of_row * out_head + row * out_row)
    else:
        out_at = out + row_index * D

    all_base = tl.full([ROWS], float("-inf"), tl.float32)
    all_total = tl.zeros([ROWS], tl.float32)
    tile = tile0
    splits = 1
    if WALK:
        splits = tl.maximum((end_tile * TILE - 1) // SPLIT - tile * TILE // SPLIT + 1, 1)
    for _ in range(splits):
        stop = end_tile
        if WALK:
            stop = tl.minimum(end_tile, (tile * TILE // SPLIT + 1) * (SPLIT // TILE))
        base = tl.full([ROWS], float("-inf"), tl.float32)
        scaled_base = base
        total = tl.zeros([ROWS], tl.float32)
        accumulators = ()
        for _c in tl.static_range(CHUNKS):
            accumulators = accumulators + (tl.zeros([ROWS, CHUNK], tl.float32),)
        for t in range(tile, stop):
            n0 = t * TILE
            kind = 1
            if MAP:
                kind = _mask_kind(tile_map, map_columns, first_row, last_row, n0, ROWS, TILE)
            if kind != 0:
                n = n0 + tl.arange(0, TILE)
                keep = (n >= seen_from) & (n < seen_to)
                s = _scores(queries, k + (n.to(tl.int64) * k_step)[:, None], keep, D, CHAIN)
                if SOFTCAP:
                    s = cap_out * _tanh(s * cap_in)
                seen = (n[None, :] >= first[:, None]) & (n[None, :] <= last[:, None])
                if MASK:
                    if kind == 1:
                        s, seen = _hide(s, seen, mask, mask_at, n, mask_step, inverse_scale)
                    # A key that the mask hides from all rows may hold anything.
                    keep = keep & (tl.max(seen.to(tl.int32), 0) != 0)
                s = tl.where(seen, s, float("-inf"))
                e = tl.zeros([TILE], tl.int32)
                w = tl.zeros([TILE], tl.float32)
                if CONVERTED:
                    e = _exponents(
                        v, n, keep, v_step, norms, norm_row, norm_step, sf, table, spread, D, TILE, FORM
                    )
                if FORM == "codes":
                    w = _norm_weight(norms, n, keep, column // NORM_BLOCK, norm_row, norm_step, sf, D)
                high, low, rescale, base, scaled_base, total = _weigh(
                    s, e, base, scaled_base, total, factor, CONVERTED
                )
                accumulators = _add_weighted(
                    accumulators, rescale, high, low, e, v, n, keep, column, v_step, w, table, TILE, FORM
                )

        # From here on weights are at most 1, of the sum and of the accumulators alike.
        lift = tl.full([ROWS], 1.0, tl.float32)
        if CONVERTED:
            lift = power_of_two(tl.where(base > float("-inf"), scaled_base - base, 0.0))
        total = total * P_UNIT
        base = base + P_BITS
        weight_before = tl.zeros([ROWS], tl.float32)
        weight = weight_before
        divisor = weight_before
        inverse = weight_before
        if WALK:
            new = tl.maximum(all_base, base)
            shift = tl.where(new == float("-inf"), 0.0, new)
            weight_before = power_of_two(all_base - shift)
            weight = power_of_two(base - shift)
            all_total = all_total * weight_before + total * weight
            all_base = new
            divisor = tl.where(all_total == 0.0, 1.0, all_total)
            inverse = tl.div_rn(1.0, divisor)
        else:
            all_base = base
            all_total = total
        for c in tl.static_range(CHUNKS):
            d = column + c * CHUNK + tl.arange(0, CHUNK)
            where = out_at[:, None] + d[None, :]
            a = accumulators[c] * unscale * lift[:, None]
            if WALK:  # merge into the running total that ``out`` holds; after the last split, divide
                if tile != tile0:
                    past = tl.load(where, mask=in_call[:, None], other=0.0)
                    a = past * weight_before[:, None] + a * weight[:, None]
                if stop == end_tile:
                    a = _divide(a, inverse, divisor)
            tl.store(where, a, mask=in_call[:, None])
        if WALK:
            tl.debug_barrier()  # what is stored may be loaded by another thread
        tile = stop
    writes_row = in_call & (column == 0)
    tl.store(maxima + row_index, all_base, mask=writes_row)
    tl.store(sums + row_index, all_total, mask=writes_row)
