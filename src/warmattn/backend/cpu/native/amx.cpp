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

// Eight idle instructions follow every instruction of the tile unit. They cost nothing where the core is ours alone.
// Where it shares its tile unit or power, tile instructions back to back slow each other down, by up to 1.6 (measured).
WA_INLINE void idle() { __asm__ volatile("nop; nop; nop; nop; nop; nop; nop; nop"); }
#define WA_LOAD(tile, from)           \
    do {                              \
        _tile_loadd(tile, from, 64);  \
        idle();                       \
    } while (0)
#define WA_PRODUCT(sum, a, b)         \
    do {                              \
        _tile_dpbf16ps(sum, a, b);    \
        idle();                       \
    } while (0)

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

// The rows of a tile that are still to be split into tiles of bf16. The loops over products split some in between, so
// that reading memory, the vector units and the tile unit overlap.
struct Packing {
    int64_t key0 = -1;      // of the tile
    int from = 0, to = 0;   // its keys that count; the rest of their groups of 32 is zeros
    int next = 0, end = 0;  // rows to do
    int at_once = 0;        // units of rows at a time, so that all are done by the end
    vf odd = set1(0.f);     // NaN once a value was not finite

    Packing() = default;
    Packing(int64_t key0, int from, int to, int units, int times)
        : key0(key0),
          from(from),
          to(to),
          next(from / 32 * 32),
          end((to + 31) / 32 * 32),
          at_once((units + times - 1) / times) {}

    bool left() const { return next < end; }
    bool counts(int key) const { return from <= key && key < to; }
};

template <int QkDtype, int Form>
class AmxEngine {
    // bf16 terms of a query or key, and of a value
    static constexpr int kScoreTerms = QkDtype == WA_F16 ? 2 : 1;
    static constexpr int kValueTerms = Form == WA_BF16 ? 1 : Form == WA_F16 ? 2 : 3;

    const WaCall& call;
    const Block& block;
    const int padded, panels;
    const int64_t steps;    // D / 32: tiles along the sum of a score
    const int64_t columns;  // D / 16: tiles along a row of V
    const uint16_t* keys;
    ValueRows<Form> values;
    char *q_tiles, *k_tiles, *v_tiles, *p_tiles;
    float *panel_scores, *accumulators, *products;
    const char* zeros;
    Packing k_packing, v_packing;
    OddKeys odd_keys;

  public:
    static constexpr int tile_keys = 128, max_vectors = 2;
    OddKeys odd_values;

    static int block_rows(int64_t D) { return D > 256 ? 128 : 256; }

    static size_t bytes(int64_t D, int rows) {
        const size_t q = size_t(rows) * D * 2 * kScoreTerms, k = size_t(tile_keys) * D * 2 * kScoreTerms;
        const size_t v = size_t(tile_keys) * D * 2 * kValueTerms, p = size_t(rows) * tile_keys * 2 * kWeightTerms;
        const size_t scores = tile_keys * max_vectors * 64;
        return q + k + v + p + scores + size_t(rows) * D * 4 + 8 * kTile + D * 4 + 512;
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
          panels((padded + 31) / 32),
          steps(call.D / 32),
          columns(call.D / 16),
          values(call, block.b, block.kv_head) {
        keys = (const uint16_t*)call.k.data + block.b * call.k.batch + block.kv_head * call.k.head;
        q_tiles = arena.take<char>(padded * call.D * 2 * kScoreTerms);
        k_tiles = arena.take<char>(tile_keys * call.D * 2 * kScoreTerms);
        v_tiles = arena.take<char>(tile_keys * call.D * 2 * kValueTerms);
        p_tiles = arena.take<char>(padded * tile_keys * 2 * kWeightTerms);
        panel_scores = arena.take<float>(tile_keys * max_vectors * 16);
        accumulators = arena.take<float>(padded * call.D);
        products = arena.take<float>(2 * 4 * 256);
        float* zero_row = arena.take<float>(call.D);
        memset(zero_row, 0, call.D * sizeof(float));
        zeros = (const char*)zero_row;
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

    void begin_tile(int64_t key0, int from, int to) {
        if (k_packing.key0 != key0) expect_tile(key0, from, to);
        while (k_packing.left()) pack_key();
        odd_keys.clear();
        if (any_nan(k_packing.odd)) find_odd_keys(key0, from, to);
        odd_values.clear();
        begin_values(key0, from, to);
    }

    void expect_tile(int64_t key0, int from, int to) {
        k_packing = Packing(key0, from, to, tile_keys, panels * int(columns / 2) * (tile_keys / 32));
    }

    void finish_values() {
        while (v_packing.left()) pack_two_values();
        k_packing.key0 = -1;  // the tile at hand, not one that is expected
        if (!any_nan(v_packing.odd)) return;
        find_odd_values(v_packing.key0, v_packing.from, v_packing.to);
        begin_values(v_packing.key0, v_packing.from, v_packing.to);
        while (v_packing.left()) pack_two_values();
    }

    float* scores_of(int) const { return panel_scores; }

    template <int R>
    void scores(int row, int from, int to, float* out) {
        const char* q = q_tiles + row / 16 * steps * kScoreTerms * kTile;
        for (int key = from; key < to; key += 32) score_32_keys<R>(q, key, out);
        if (odd_keys.any()) score_odd_keys<R>(row, from, to, out);
    }

    // A tiles [row / 16][key / 32][term]: rows down, keys across.
    template <int R>
    void keep_weights(int row, int from, int to, const float* weights) {
        constexpr int L = R * 16;
        for (int r = 0; r < R; r++)
            for (int k = from; k < to; k += 32) {
                vi low[16], high[16];
                for (int i = 0; i < 16; i++) low[i] = _mm512_castps_si512(load(weights + (k + i) * L + r * 16));
                transpose_16x16(low);
                for (int i = 0; i < 16; i++) high[i] = _mm512_castps_si512(load(weights + (k + 16 + i) * L + r * 16));
                transpose_16x16(high);
                char* tile = weight_tiles(row + r * 16, k);
                for (int i = 0; i < 16; i++) {
                    vf a = _mm512_castsi512_ps(low[i]), b = _mm512_castsi512_ps(high[i]);
                    for (int t = 0; t < kWeightTerms; t++) {
                        _mm512_store_si512(tile + t * kTile + i * 64, upper_halves(a, b));
                        a = rest(a), b = rest(b);
                    }
                }
            }
    }

    template <int R>
    void accumulate(int row, int from, int to, const float* rescale) {
        for (int64_t column = 0; column < columns; column += 2) weigh_columns<R>(row, column, from, to, rescale);
        for (int i = 0; i < 2 * R; i++) add_product(row, columns - 2, rescale, i);
    }

    void export_rows(float* to) {
        for (int row = 0; row < block.rows; row++) {
            const float* from = accumulator(row / 16 * 16, 0) + row % 16 * 16;
            for (int64_t column = 0; column < columns; column++)
                store(to + row * call.D + column * 16, load(from + column * 256));
        }
    }

  private:
    const uint16_t* query(int row) const {
        return (const uint16_t*)call.q.data + block.b * call.q.batch + block.head(row) * call.q.head +
               block.query(row) * call.q.row;
    }
    char* weight_tiles(int row, int key) const {
        return p_tiles + (row / 16 * (tile_keys / 32) + key / 32) * kWeightTerms * kTile;
    }
    float* accumulator(int row, int64_t column) const { return accumulators + (row / 16 * columns + column) * 256; }

    void begin_values(int64_t key0, int from, int to) {
        v_packing = Packing(key0, from, to, tile_keys / 2, panels * int(steps) * (tile_keys / 32));
    }

    // One row of the A tiles [key / 16][step][term]: keys down, d across.
    void pack_key() {
        const int k = k_packing.next++;
        const bool inside = k_packing.counts(k);
        const uint16_t* row = inside ? keys + (k_packing.key0 + k) * call.k.row : (const uint16_t*)zeros;
        const char* ahead = inside ? values.row(k_packing.key0 + k) : zeros;  // V of this key comes next
        char* tile = k_tiles + k / 16 * steps * kScoreTerms * kTile + k % 16 * 64;
        vf odd = k_packing.odd;
        for (int64_t step = 0; step < steps; step++) {
            _mm_prefetch(ahead + step * 32 * ValueRows<Form>::element_bytes, _MM_HINT_T1);
            vf low = widen<QkDtype>(row + step * 32), high = widen<QkDtype>(row + step * 32 + 16);
            odd = fma(low, set1(0.f), fma(high, set1(0.f), odd));
            for (int t = 0; t < kScoreTerms; t++) {
                _mm512_store_si512(tile + (step * kScoreTerms + t) * kTile, upper_halves(low, high));
                low = rest(low), high = rest(high);
            }
        }
        k_packing.odd = odd;
    }

    // Two rows of V, a row of the B tiles [key / 32][column][term]: pairs of keys down, d across. Rows of odd_values are
    // packed as zeros: 0 * NaN is NaN, and would reach rows that do not see the key.
    void pack_two_values() {
        const int k = v_packing.next;
        v_packing.next += 2;
        const char* rows[2];
        bool inside[2];
        for (int j = 0; j < 2; j++) {
            inside[j] = v_packing.counts(k + j) && !odd_values.has(k + j);
            rows[j] = inside[j] ? values.row(v_packing.key0 + k + j) : zeros;
        }
        const char* ahead = (const char*)(keys + (v_packing.key0 + k + tile_keys) * call.k.row);  // K of the next tile
        char* tile = v_tiles + k / 32 * columns * kValueTerms * kTile + k % 32 / 2 * 64;
        vf odd = v_packing.odd;
        for (int64_t column0 = 0; column0 < columns; column0 += 16) {
            float weights[2];
            for (int j = 0; j < 2; j++)
                weights[j] = inside[j] ? values.weight(v_packing.key0 + k + j, column0 / 16) : 0.f;
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
        v_packing.odd = odd;
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
            const uint16_t* key = keys + (v_packing.key0 + k) * call.k.row;
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
        constexpr int L = R * 16, kNext = kScoreTerms * kTile;
        const char* k0 = k_tiles + key / 16 * steps * kNext;
        const char* k1 = k0 + steps * kNext;
        const char* q1 = q0 + steps * kNext;
        _tile_zero(0);
        _tile_zero(1);
        if (R == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
#define WA_LOAD_KEYS(term)                   \
    WA_LOAD(4, k0 + (term) * kTile); \
    WA_LOAD(5, k1 + (term) * kTile)
#define WA_LOAD_QUERIES(term)                \
    WA_LOAD(6, q0 + (term) * kTile); \
    if (R == 2) WA_LOAD(7, q1 + (term) * kTile)
#define WA_MULTIPLY()            \
    WA_PRODUCT(0, 4, 6);     \
    WA_PRODUCT(1, 5, 6);     \
    if (R == 2) {                \
        WA_PRODUCT(2, 4, 7); \
        WA_PRODUCT(3, 5, 7); \
    }
        for (int64_t step = 0; step < steps; step++) {
            WA_LOAD_KEYS(0);
            WA_LOAD_QUERIES(0);
            WA_MULTIPLY();
            for (int n = v_packing.at_once; n > 0 && v_packing.left(); n--) pack_two_values();
            if (kScoreTerms == 2) {
                WA_LOAD_QUERIES(1);
                WA_MULTIPLY();
                WA_LOAD_KEYS(1);
                WA_MULTIPLY();
                WA_LOAD_QUERIES(0);
                WA_MULTIPLY();
            }
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

    // acc = acc * rescale + product for one of the 2 R tiles that weigh_columns left at `column`.
    WA_INLINE_MEMBER void add_product(int row, int64_t column, const float* rescale, int i) {
        float* acc = accumulator(row + i / 2 * 16, column + i % 2);
        const float* product = products + (column / 2 % 2 * 4 + i) * 256;
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++)
            store(acc + j * 16, fma(load(acc + j * 16), set1(rescale[i / 2 * 16 + j]), load(product + j * 16)));
    }

    // products = P . V over groups of 32 keys, for R x 16 rows and 2 x 16 columns. Meanwhile the vector units add the
    // products of the columns before.
    template <int R>
    WA_INLINE_MEMBER void weigh_columns(int row, int64_t column, int from, int to, const float* rescale) {
        constexpr int kStride = kValueTerms * kTile;
        const char* v = v_tiles + (from / 32 * columns + column) * kStride;
        int added = column > 0 ? 0 : 2 * R;
        _tile_zero(0);
        _tile_zero(1);
        if (R == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
#define WA_LOAD_WEIGHTS(term)                \
    WA_LOAD(4, p0 + (term) * kTile); \
    if (R == 2) WA_LOAD(5, p1 + (term) * kTile)
#define WA_LOAD_VALUES(term)                \
    WA_LOAD(6, v + (term) * kTile); \
    WA_LOAD(7, v + kStride + (term) * kTile)
#define WA_MULTIPLY()            \
    WA_PRODUCT(0, 4, 6);     \
    WA_PRODUCT(1, 4, 7);     \
    if (R == 2) {                \
        WA_PRODUCT(2, 5, 6); \
        WA_PRODUCT(3, 5, 7); \
    }
        for (int key = from; key < to; key += 32, v += columns * kStride) {
            const char* p0 = weight_tiles(row, key);
            const char* p1 = weight_tiles(row + 16, key);
            WA_LOAD_WEIGHTS(0);
            if (kValueTerms == 3) {
                WA_LOAD_VALUES(2);
                WA_MULTIPLY();
            }
            WA_LOAD_VALUES(0);
            WA_MULTIPLY();
            if (added < 2 * R) add_product(row, column - 2, rescale, added++);
            for (int n = k_packing.at_once; n > 0 && k_packing.left(); n--) pack_key();
            if (kValueTerms > 1) {
                WA_LOAD_VALUES(1);
                WA_MULTIPLY();
            }
            WA_LOAD_WEIGHTS(1);
            if (kValueTerms > 1) {
                WA_MULTIPLY();
                WA_LOAD_VALUES(0);
            }
            WA_MULTIPLY();
            WA_LOAD_WEIGHTS(2);
            WA_MULTIPLY();
        }
#undef WA_LOAD_WEIGHTS
#undef WA_LOAD_VALUES
#undef WA_MULTIPLY
        while (added < 2 * R) add_product(row, column - 2, rescale, added++);
        float* to_add = products + column / 2 % 2 * 1024;
        _tile_stored(0, to_add, 64);
        _tile_stored(1, to_add + 256, 64);
        if (R == 2) {
            _tile_stored(2, to_add + 512, 64);
            _tile_stored(3, to_add + 768, 64);
        }
    }
};

}  // namespace warmattn::WA_ISA

extern "C" int warmattn_attend_amx(const WaCall* call) {
    return warmattn::WA_ISA::attend_call<warmattn::WA_ISA::AmxEngine>(*call);
}
