// The AMX family: f32-accurate products out of bf16 tiles, by splitting every operand exactly into bf16 terms.
//
// An f16 value is the sum of two bf16 values, an f32 value of three (8 significant bits each, cut off, not rounded, so
// that the rest is exact). A score needs all 4 products of two split f16 values: 3 would leave 3e-6. A weighted value
// needs the 5 largest of the 3 x 2 products for f16 V and the 6 largest of 3 x 3 for f32 V: what is left out is below
// 2^-24 of the sum. bf16 operands are one term and exact.
//
// Tiles of 16 rows x 64 bytes:  scores[key][row] = K[key][d] . Q[d][row]   (rows in lanes, as the softmax wants them)
//                               acc[row][d] = P[row][key] . V[key][d]
// The order of products that enter one element is the same in every panel shape, so bits do not depend on the shape.
#include "attention.h"

namespace warmattn::WA_ISA {

constexpr int kTile = 1024;  // bytes
constexpr int kWeightTerms = 3;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The bf16 term of x (its upper half) stays in place; what is left of x after it is exact.
WA_INLINE vf rest(vf x) {
    return x - _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(int(0xffff0000))));
}

// Upper halves of 16 + 16 values, in order: one row of an A tile.
WA_INLINE vi upper_halves(vf low, vf high) {
    alignas(64) static const uint16_t odd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(_mm512_castps_si512(low), _mm512_load_si512(odd), _mm512_castps_si512(high));
}

// Upper halves of two rows, interleaved: one row pair of a B tile.
WA_INLINE vi interleave_upper(vf even, vf odd) {
    const vi low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    return _mm512_ternarylogic_epi32(low, _mm512_castps_si512(odd), _mm512_set1_epi32(int(0xffff0000)), 0xF8);
}

WA_INLINE void transpose_16x16(vi r[16]) {
    vi t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

WA_INLINE void prefetch_tile(const char* tile) {
#pragma GCC unroll 16
    for (int line = 0; line < kTile; line += 64) _mm_prefetch(tile + line, _MM_HINT_T0);
}

template <int QkDtype, int Form>
class AmxEngine {
    // bf16 terms of a query or key, and of a value
    static constexpr int kScoreTerms = QkDtype == WA_F16 ? 2 : 1;
    static constexpr int kValueTerms = Form == WA_BF16 ? 1 : Form == WA_F16 ? 2 : 3;

    const WaCall& call;
    const Block& block;
    const int padded;
    const int64_t steps;    // D / 32: tiles along the sum of a score
    const int64_t columns;  // D / 16: tiles along a row of V
    const uint16_t* keys;
    ValueRows<Form> values;
    char *q_tiles, *k_tiles, *v_tiles, *p_tiles;
    float *accumulators, *products;
    const char* zeros;
    OddKeys odd_keys;
    int64_t tile_key0 = 0;
    int tile_from = 0, tile_to = 0;
    // One panel of rows reads a tile once: its tiles of bf16 are then made where they are used and stay in L1.
    const bool lazy;
    vf largest_centroid = set1(0.f);  // per lane; rounding keeps order, so no other centroid's product overflows before

  public:
    static constexpr int tile_keys = 128, max_vectors = 2;
    OddKeys odd_values;

    static int block_rows(int64_t D) { return D > 256 ? 128 : 256; }

    static size_t bytes(int64_t D, int rows) {
        const size_t q = size_t(rows) * D * 2 * kScoreTerms, k = size_t(tile_keys) * D * 2 * kScoreTerms;
        const size_t v = size_t(tile_keys) * D * 2 * kValueTerms, p = max_vectors * tile_keys / 32 * kWeightTerms * kTile;
        return q + k + v + p + size_t(rows) * D * 4 + 8 * kTile + D * 4 + 512;
    }

    static void enter_thread() {
        const TileConfig config;
        _tile_loadconfig(&config);
    }
    static void leave_thread() { _tile_release(); }

    AmxEngine(const WaCall& call, const Block& block, int padded, Arena& arena)
        : call(call),
          block(block),
          padded(padded),
          steps(call.D / 32),
          columns(call.D / 16),
          values(call, block.b, block.kv_head),
          lazy(padded == 16) {
        keys = (const uint16_t*)call.k.data + block.b * call.k.batch + block.kv_head * call.k.head;
        q_tiles = arena.take<char>(padded * call.D * 2 * kScoreTerms);
        k_tiles = arena.take<char>(tile_keys * call.D * 2 * kScoreTerms);
        v_tiles = arena.take<char>(tile_keys * call.D * 2 * kValueTerms);
        p_tiles = arena.take<char>(max_vectors * tile_keys / 32 * kWeightTerms * kTile);
        accumulators = arena.take<float>(padded * call.D);
        products = arena.take<float>(2 * 4 * 256);
        float* zero_row = arena.take<float>(call.D);
        memset(zero_row, 0, call.D * sizeof(float));
        zeros = (const char*)zero_row;
        if (Form == WA_CODES)
            for (int i = 0; i < 256; i += W)
                largest_centroid = max_or_second(absolute(loadu(call.centroids + i)), largest_centroid);
    }

    // B tiles [row / 16][step][term]: pairs of d down, rows across.
    void pack_queries() {
        for (int row0 = 0; row0 < padded; row0 += 16)
            for (int64_t step = 0; step < steps; step++) {
                vi terms[kScoreTerms][16];
                for (int i = 0; i < 16; i++) {
                    vf low = set1(0.f), high = set1(0.f);
                    if (row0 + i < block.rows) {
                        const uint16_t* from = query(row0 + i) + step * 32;
                        low = widen<QkDtype>(from), high = widen<QkDtype>(from + 16);
                    }
                    for (int t = 0; t < kScoreTerms; t++) {
                        terms[t][i] = upper_halves(low, high);
                        low = rest(low), high = rest(high);
                    }
                }
                for (int t = 0; t < kScoreTerms; t++) {
                    transpose_16x16(terms[t]);
                    char* tile = q_tiles + ((row0 / 16 * steps + step) * kScoreTerms + t) * kTile;
                    for (int i = 0; i < 16; i++) _mm512_store_si512(tile + i * 64, terms[t][i]);
                }
            }
    }

    void clear() { memset(accumulators, 0, size_t(padded) * call.D * sizeof(float)); }

    void load_tile(int64_t key0, int from, int to) {
        tile_key0 = key0, tile_from = from, tile_to = to;
        odd_keys.clear();
        odd_values.clear();
        if (lazy) {
            if (any_odd_value(key0, from, to)) find_odd_values(key0, from, to);
            return;
        }
        if (load_keys(key0, from, to)) find_odd_keys(key0, from, to);
        if (load_values(key0, from, to)) {
            find_odd_values(key0, from, to);
            load_values(key0, from, to);
        }
    }

    template <int R>
    void scores(int row, int from, int to, float* out) {
        const char* q = q_tiles + row / 16 * steps * kScoreTerms * kTile;
        int key = from;
        if (R == 1 && lazy) {
            vf odd = set1(0.f);
            for (; key < to; key += 64) odd = fma(score_as_packed(q, key, to, out), set1(0.f), odd);
            if (any_nan(odd)) find_odd_keys(tile_key0, tile_from, tile_to);
        } else if (R == 1) {
            for (; key + 64 <= to; key += 64) score_64_keys(q, key, out);
        }
        for (; key < to; key += 32) score_32_keys<R>(q, key, out);
        if (odd_keys.any()) score_odd_keys<R>(row, from, to, out);
    }

    template <int R>
    void accumulate(int row, int from, int to, const float* weights, const float* rescale) {
        split_weights<R>(from, to, weights);
        constexpr int kColumns = 4 / R;  // tiles of columns at a time
        for (int64_t column = 0; column < columns; column += kColumns) {
            const char* v = v_tiles + (from / 32 * columns + column) * kValueTerms * kTile;
            int64_t group_stride = columns * kValueTerms * kTile;
            if (lazy) {
                pack_columns(from, to, column, kColumns);
                v = v_tiles;
                group_stride = kColumns * kValueTerms * kTile;
            }
            float* previous = column ? accumulator(row, column - kColumns) : nullptr;
            weigh_columns<R>(from / 32, to / 32, v, group_stride, previous, rescale, column / kColumns);
        }
        for (int quarter = 0; quarter < 4; quarter++)
            add_products<R>(accumulator(row, columns - kColumns), rescale, quarter, columns / kColumns - 1);
    }

    void export_rows(float* to) {
        for (int row = 0; row < block.rows; row++) {
            const float* from = accumulators + row / 16 * columns * 256 + row % 16 * 16;
            for (int64_t column = 0; column < columns; column++)
                store(to + row * call.D + column * 16, load(from + column * 256));
        }
    }

  private:
    const uint16_t* query(int row) const {
        return (const uint16_t*)call.q.data + block.b * call.q.batch + block.head(row) * call.q.head +
               block.query(row) * call.q.row;
    }

    // A tiles [key / 16][step][term]: keys down, d across. True when a value is not finite.
    bool load_keys(int64_t key0, int from, int to) {
        vf odd = set1(0.f);
        for (int k = from / 32 * 32; k < (to + 31) / 32 * 32; k++) {
            const bool inside = from <= k && k < to;
            const uint16_t* row = inside ? keys + (key0 + k) * call.k.row : (const uint16_t*)zeros;
            const char* ahead = inside ? values.row(key0 + k) : zeros;  // V of this key comes next
            char* tile = k_tiles + k / 16 * steps * kScoreTerms * kTile + k % 16 * 64;
            for (int64_t step = 0; step < steps; step++) {
                _mm_prefetch(ahead + step * 32 * ValueRows<Form>::element_bytes, _MM_HINT_T1);
                vf low = widen<QkDtype>(row + step * 32), high = widen<QkDtype>(row + step * 32 + 16);
                odd = fma(low, set1(0.f), fma(high, set1(0.f), odd));
                for (int t = 0; t < kScoreTerms; t++) {
                    _mm512_store_si512(tile + (step * kScoreTerms + t) * kTile, upper_halves(low, high));
                    low = rest(low), high = rest(high);
                }
            }
        }
        return any_nan(odd);
    }

    // B tiles [key / 32][column][term]: pairs of keys down, d across. Rows of odd_values are loaded as zeros: 0 * NaN
    // is NaN, and would reach rows that do not see the key. True when a value is not finite.
    bool load_values(int64_t key0, int from, int to) {
        vf odd = set1(0.f);
        for (int k = from / 32 * 32; k < (to + 31) / 32 * 32; k += 2) {
            const char* rows[2];
            bool inside[2];
            for (int j = 0; j < 2; j++) {
                inside[j] = from <= k + j && k + j < to && !odd_values.has(k + j);
                rows[j] = inside[j] ? values.row(key0 + k + j) : zeros;
            }
            const char* ahead = (const char*)(keys + (key0 + k + tile_keys) * call.k.row);  // K of the next tile
            char* tile = v_tiles + k / 32 * columns * kValueTerms * kTile + k % 32 / 2 * 64;
            for (int64_t column0 = 0; column0 < columns; column0 += 16) {
                float weights[2];
                for (int j = 0; j < 2; j++) weights[j] = inside[j] ? values.weight(key0 + k + j, column0 / 16) : 0.f;
                for (int64_t column = column0; column < smaller(column0 + 16, columns); column++) {
                    _mm_prefetch(ahead + column * 32, _MM_HINT_T1);
                    _mm_prefetch(ahead + call.k.row * 2 + column * 32, _MM_HINT_T1);
                    vf even = values.values(rows[0], column * 16, weights[0]);
                    vf later = values.values(rows[1], column * 16, weights[1]);
                    odd = fma(even, set1(0.f), fma(later, set1(0.f), odd));
                    for (int t = 0; t < kValueTerms; t++) {
                        _mm512_store_si512(tile + (column * kValueTerms + t) * kTile, interleave_upper(even, later));
                        even = rest(even), later = rest(later);
                    }
                }
            }
        }
        return any_nan(odd);
    }

    void find_odd_keys(int64_t key0, int from, int to) {
        for (int k = from; k < to; k++) {
            vf odd = set1(0.f);
            for (int64_t d = 0; d < call.D; d += W)
                odd = fma(widen<QkDtype>(keys + (key0 + k) * call.k.row + d), set1(0.f), odd);
            if (any_nan(odd)) odd_keys.add(k);
        }
    }

    void find_odd_values(int64_t key0, int from, int to) {
        for (int k = from; k < to; k++) {
            vf odd = set1(0.f);
            for (int64_t d = 0; d < call.D; d += W)
                odd = fma(values.values(values.row(key0 + k), d, values.weight(key0 + k, d / 256)), set1(0.f), odd);
            if (any_nan(odd)) odd_values.add(k);
        }
    }

    // The split of an infinity is inf - inf = NaN; a plain dot says whether the score is NaN, inf or -inf.
    template <int R>
    void score_odd_keys(int row, int from, int to, float* out) {
        for (int k = from; k < to; k++) {
            if (!odd_keys.has(k)) continue;
            const uint16_t* key = keys + (tile_key0 + k) * call.k.row;
            for (int lane = 0; lane < smaller(R * W, block.rows - row); lane++) {
                float dot = 0.f;
                for (int64_t d = 0; d < call.D; d++)
                    dot += widen_one(QkDtype, query(row + lane)[d]) * widen_one(QkDtype, key[d]);
                out[k * R * W + lane] = dot;
            }
        }
    }

    // 32 keys x R x 16 rows in tiles 0..3; tiles 4, 5 hold a term of the keys, 6, 7 of the queries.
    template <int R>
    WA_INLINE_MEMBER void score_32_keys(const char* q0, int key, float* out) {
        constexpr int L = R * 16;
        const char* k0 = k_tiles + key / 16 * steps * kScoreTerms * kTile;
        const char* k1 = k0 + steps * kScoreTerms * kTile;
        const char* q1 = q0 + steps * kScoreTerms * kTile;
        _tile_zero(0);
        _tile_zero(1);
        if (R == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
#define WA_LOAD_KEYS(term)                   \
    _tile_loadd(4, k0 + (term) * kTile, 64); \
    _tile_loadd(5, k1 + (term) * kTile, 64)
#define WA_LOAD_QUERIES(term)                \
    _tile_loadd(6, q0 + (term) * kTile, 64); \
    if (R == 2) _tile_loadd(7, q1 + (term) * kTile, 64)
#define WA_MULTIPLY()             \
    _tile_dpbf16ps(0, 4, 6);      \
    _tile_dpbf16ps(1, 5, 6);      \
    if (R == 2) {                 \
        _tile_dpbf16ps(2, 4, 7);  \
        _tile_dpbf16ps(3, 5, 7);  \
    }
        for (int64_t step = 0; step < steps; step++) {
            constexpr int kNext = kScoreTerms * kTile;
            WA_LOAD_KEYS(0);
            WA_LOAD_QUERIES(0);
            WA_MULTIPLY();
            prefetch_tile(k0 + kNext);
            if (kScoreTerms == 2) {
                WA_LOAD_QUERIES(1);
                WA_MULTIPLY();
                prefetch_tile(k0 + kNext + kTile);
                WA_LOAD_KEYS(1);
                WA_MULTIPLY();
                prefetch_tile(k1 + kNext);
                WA_LOAD_QUERIES(0);
                WA_MULTIPLY();
            }
            prefetch_tile(k1 + kNext + (kScoreTerms - 1) * kTile);
            k0 += kNext, k1 += kNext, q0 += kNext, q1 += kNext;
        }
#undef WA_LOAD_KEYS
#undef WA_LOAD_QUERIES
#undef WA_MULTIPLY
        _tile_stored(0, out + key * L, L * 4);
        _tile_stored(1, out + (key + 16) * L, L * 4);
        if (R == 2) {
            _tile_stored(2, out + key * L + 16, L * 4);
            _tile_stored(3, out + (key + 16) * L + 16, L * 4);
        }
    }

    // 64 keys x 16 rows: four independent sums, where 32 keys of one vector of rows would wait for each other.
    void score_64_keys(const char* q, int key, float* out) {
        const int64_t next = steps * kScoreTerms * kTile;
        const char* k = k_tiles + key / 16 * next;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
#define WA_MULTIPLY(key_term, query_tile)                       \
    _tile_loadd(4, k + (key_term) * kTile, 64);                 \
    _tile_dpbf16ps(0, 4, query_tile);                           \
    _tile_loadd(5, k + next + (key_term) * kTile, 64);          \
    _tile_dpbf16ps(1, 5, query_tile);                           \
    _tile_loadd(4, k + 2 * next + (key_term) * kTile, 64);      \
    _tile_dpbf16ps(2, 4, query_tile);                           \
    _tile_loadd(5, k + 3 * next + (key_term) * kTile, 64);      \
    _tile_dpbf16ps(3, 5, query_tile)
        for (int64_t step = 0; step < steps; step++) {
            _tile_loadd(6, q, 64);
            WA_MULTIPLY(0, 6);
            if (kScoreTerms == 2) {
                _tile_loadd(7, q + kTile, 64);
                WA_MULTIPLY(0, 7);
                WA_MULTIPLY(1, 7);
                WA_MULTIPLY(1, 6);
            }
            k += kScoreTerms * kTile, q += kScoreTerms * kTile;
        }
#undef WA_MULTIPLY
        _tile_stored(0, out + key * 16, 64);
        _tile_stored(1, out + (key + 16) * 16, 64);
        _tile_stored(2, out + (key + 32) * 16, 64);
        _tile_stored(3, out + (key + 48) * 16, 64);
    }

    // As score_64_keys, but each step's tiles are packed just before their products, into one of two small buffers.
    // Returns a vector that is NaN where a key was not finite.
    vf score_as_packed(const char* q, int key, int to, float* out) {
        const int groups = smaller(4, (to - key) / 16);
        vf odd = set1(0.f);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        pack_step(key, groups, 0, k_tiles, odd);
        for (int64_t step = 0; step < steps; step++) {
            const char* k = k_tiles + step % 2 * 8 * kTile;
            if (step + 1 < steps) pack_step(key, groups, step + 1, k_tiles + (step + 1) % 2 * 8 * kTile, odd);
#define WA_MULTIPLY(key_term, query_tile)                      \
    _tile_loadd(4, k + (key_term) * kTile, 64);                \
    _tile_dpbf16ps(0, 4, query_tile);                          \
    _tile_loadd(5, k + (2 + (key_term)) * kTile, 64);          \
    _tile_dpbf16ps(1, 5, query_tile);                          \
    if (groups > 2) {                                          \
        _tile_loadd(4, k + (4 + (key_term)) * kTile, 64);      \
        _tile_dpbf16ps(2, 4, query_tile);                      \
        _tile_loadd(5, k + (6 + (key_term)) * kTile, 64);      \
        _tile_dpbf16ps(3, 5, query_tile);                      \
    }
            _tile_loadd(6, q, 64);
            WA_MULTIPLY(0, 6);
            if (kScoreTerms == 2) {
                _tile_loadd(7, q + kTile, 64);
                WA_MULTIPLY(0, 7);
                WA_MULTIPLY(1, 7);
                WA_MULTIPLY(1, 6);
            }
#undef WA_MULTIPLY
            q += kScoreTerms * kTile;
        }
        _tile_stored(0, out + key * 16, 64);
        _tile_stored(1, out + (key + 16) * 16, 64);
        if (groups > 2) {
            _tile_stored(2, out + (key + 32) * 16, 64);
            _tile_stored(3, out + (key + 48) * 16, 64);
        }
        return odd;
    }

    // Tiles [key / 16][term] of one step, for `groups` x 16 keys; the term's place is fixed at two a group.
    WA_INLINE_MEMBER void pack_step(int key, int groups, int64_t step, char* to, vf& odd) {
        for (int k = 0; k < groups * 16; k++) {
            const bool inside = tile_from <= key + k && key + k < tile_to;
            const uint16_t* row = inside ? keys + (tile_key0 + key + k) * call.k.row : (const uint16_t*)zeros;
            // The same line of a key two packs of 64 on: the rows are too far apart for the hardware to guess.
            _mm_prefetch((const char*)(row + (inside ? 128 * call.k.row : 0) + step * 32), _MM_HINT_T1);
            vf low = widen<QkDtype>(row + step * 32), high = widen<QkDtype>(row + step * 32 + 16);
            odd = fma(low, set1(0.f), fma(high, set1(0.f), odd));
            for (int t = 0; t < kScoreTerms; t++) {
                _mm512_store_si512(to + (k / 16 * 2 + t) * kTile + k % 16 * 64, upper_halves(low, high));
                low = rest(low), high = rest(high);
            }
        }
    }

    // Tiles [key / 32][column][term] of a few columns, for all keys of the tile.
    WA_INLINE_MEMBER void pack_columns(int from, int to, int64_t column0, int count) {
        for (int k = from; k < to; k += 2) {
            const char* rows[2];
            float weights[2];
            for (int j = 0; j < 2; j++) {
                const bool inside = tile_from <= k + j && k + j < tile_to && !odd_values.has(k + j);
                rows[j] = inside ? values.row(tile_key0 + k + j) : zeros;
                weights[j] = inside ? values.weight(tile_key0 + k + j, column0 / 16) : 0.f;
            }
            char* tile = v_tiles + (k - from) / 32 * count * kValueTerms * kTile + k % 32 / 2 * 64;
            for (int c = 0; c < count; c++) {
                vf even = values.values(rows[0], (column0 + c) * 16, weights[0]);
                vf later = values.values(rows[1], (column0 + c) * 16, weights[1]);
                for (int t = 0; t < kValueTerms; t++) {
                    _mm512_store_si512(tile + (c * kValueTerms + t) * kTile, interleave_upper(even, later));
                    even = rest(even), later = rest(later);
                }
            }
        }
    }

    // Whether a value of these keys is not finite. It also brings the rows near, the next tile's included.
    bool any_odd_value(int64_t key0, int from, int to) {
        vf odd = set1(0.f);
        for (int k = from; k < to; k++) {
            const char* row = values.row(key0 + k);
            if (Form == WA_CODES) {
                for (int64_t block = 0; block < (call.D + 255) / 256; block++)
                    odd = fma(largest_centroid * set1(values.weight(key0 + k, block)), set1(0.f), odd);
            } else {
                for (int64_t d = 0; d < call.D; d += W) odd = fma(values.values(row, d, 1.f), set1(0.f), odd);
            }
            const char* ahead = row + tile_keys * values.stride;
            for (int64_t byte = 0; byte < call.D * ValueRows<Form>::element_bytes; byte += 64)
                _mm_prefetch(ahead + byte, _MM_HINT_T1);
        }
        return any_nan(odd);
    }

    // A tiles [row / 16][key / 32][term]: rows down, keys across.
    template <int R>
    void split_weights(int from, int to, const float* weights) {
        constexpr int L = R * 16;
        for (int r = 0; r < R; r++)
            for (int k = from; k < to; k += 32) {
                vi low[16], high[16];
                for (int i = 0; i < 16; i++) low[i] = _mm512_castps_si512(load(weights + (k + i) * L + r * 16));
                transpose_16x16(low);
                for (int i = 0; i < 16; i++) high[i] = _mm512_castps_si512(load(weights + (k + 16 + i) * L + r * 16));
                transpose_16x16(high);
                char* tile = p_tiles + (r * (tile_keys / 32) + k / 32) * kWeightTerms * kTile;
                for (int i = 0; i < 16; i++) {
                    vf a = _mm512_castsi512_ps(low[i]), b = _mm512_castsi512_ps(high[i]);
                    for (int t = 0; t < kWeightTerms; t++) {
                        _mm512_store_si512(tile + t * kTile + i * 64, upper_halves(a, b));
                        a = rest(a), b = rest(b);
                    }
                }
            }
    }

    float* accumulator(int row, int64_t column) { return accumulators + (row / 16 * columns + column) * 256; }

    // A quarter of: acc = acc * rescale + products, for the four tiles that weigh_columns left in its turn.
    template <int R>
    WA_INLINE_MEMBER void add_products(float* acc, const float* rescale, int quarter, int64_t turn) {
        const int r = R == 2 ? quarter / 2 : 0, c = R == 2 ? quarter % 2 : quarter;
        acc += (r * columns + c) * 256;
        const float* product = products + (turn % 2 * 4 + quarter) * 256;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            store(acc + i * 16, fma(load(acc + i * 16), set1(rescale[r * 16 + i]), load(product + i * 16)));
    }

    // products = P . V over groups of 32 keys, for R x 16 rows and 4 / R tiles of 16 columns. Meanwhile the vector unit
    // adds the products of the turn before to their accumulators, `previous`.
    template <int R>
    WA_INLINE_MEMBER void weigh_columns(int group, int end, const char* v, int64_t group_stride, float* previous,
                                        const float* rescale, int64_t turn) {
        constexpr int kStride = kValueTerms * kTile;
        int quarter = previous ? 0 : 4;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (; group < end; group++, v += group_stride) {
            const char* p0 = p_tiles + group * kWeightTerms * kTile;
            const char* p1 = p0 + tile_keys / 32 * kWeightTerms * kTile;
// Two panels of rows: 2 x 2 tiles. One panel: 1 x 4, with the columns' tiles passing through 6 and 7.
#define WA_LOAD_WEIGHTS(term)                    \
    _tile_loadd(4, p0 + (term) * kTile, 64);     \
    if (R == 2) _tile_loadd(5, p1 + (term) * kTile, 64)
#define WA_LOAD_VALUES(term)                             \
    if (R == 2) {                                        \
        _tile_loadd(6, v + (term) * kTile, 64);          \
        _tile_loadd(7, v + kStride + (term) * kTile, 64); \
    }
#define WA_MULTIPLY(term)                                     \
    if (R == 2) {                                             \
        _tile_dpbf16ps(0, 4, 6);                              \
        _tile_dpbf16ps(1, 4, 7);                              \
        _tile_dpbf16ps(2, 5, 6);                              \
        _tile_dpbf16ps(3, 5, 7);                              \
    } else {                                                  \
        _tile_loadd(6, v + (term) * kTile, 64);               \
        _tile_dpbf16ps(0, 4, 6);                              \
        _tile_loadd(7, v + kStride + (term) * kTile, 64);     \
        _tile_dpbf16ps(1, 4, 7);                              \
        _tile_loadd(6, v + 2 * kStride + (term) * kTile, 64); \
        _tile_dpbf16ps(2, 4, 6);                              \
        _tile_loadd(7, v + 3 * kStride + (term) * kTile, 64); \
        _tile_dpbf16ps(3, 4, 7);                              \
    }
            const char* next = v + group_stride;
            if (quarter < 4) add_products<R>(previous, rescale, quarter++, turn - 1);
            WA_LOAD_WEIGHTS(0);
            if (kValueTerms == 3) {
                WA_LOAD_VALUES(2);
                WA_MULTIPLY(2);
                prefetch_tile(next + 2 * kTile);
                prefetch_tile(next + 5 * kTile);
            }
            WA_LOAD_VALUES(0);
            WA_MULTIPLY(0);
            prefetch_tile(next);
            prefetch_tile(next + kStride);
            if (kValueTerms > 1) {
                WA_LOAD_VALUES(1);
                WA_MULTIPLY(1);
                prefetch_tile(next + kTile);
                prefetch_tile(next + kStride + kTile);
            }
            WA_LOAD_WEIGHTS(1);
            if (kValueTerms > 1) {
                WA_MULTIPLY(1);
                WA_LOAD_VALUES(0);
            }
            WA_MULTIPLY(0);
            WA_LOAD_WEIGHTS(2);
            WA_MULTIPLY(0);
#undef WA_LOAD_WEIGHTS
#undef WA_LOAD_VALUES
#undef WA_MULTIPLY
        }
        while (quarter < 4) add_products<R>(previous, rescale, quarter++, turn - 1);
        float* to = products + turn % 2 * 1024;
        _tile_stored(0, to, 64);
        _tile_stored(1, to + 256, 64);
        _tile_stored(2, to + 512, 64);
        _tile_stored(3, to + 768, 64);
    }
};

}  // namespace warmattn::WA_ISA

extern "C" int warmattn_attend_amx(const WaCall* call) {
    return warmattn::WA_ISA::attend_call<warmattn::WA_ISA::AmxEngine>(*call);
}
