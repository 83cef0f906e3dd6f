// The FMA family: f32 products on vectors of rows, for AVX-512, AVX2, NEON and portable C++ (WA_ISA names the build).
//
// K and V tiles are widened to f32 in cache; a register block holds NB keys (or columns of V) x R vectors of rows.
// Sums are cut into chains, at most 64 products of a dot and one tile's keys of P.V, and then added: shorter chains
// round less, and every element's order of additions is fixed.
#include "attention.h"

namespace warmattn::WA_ISA {

constexpr int kChain = 64;

template <int R>
constexpr int kBlockOf = W == 8 ? (R == 1 ? 8 : 4) : (R == 1 ? 16 : 8);

template <int R>
WA_INLINE void dot_chain(const float* q, const float* k, int64_t k_stride, int count, float* scores, bool add) {
    constexpr int NB = kBlockOf<R>, L = R * W;
    vf sums[NB][R];
#pragma GCC unroll 16
    for (int j = 0; j < NB; j++)
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) sums[j][r] = set1(0.f);
    for (int d = 0; d < count; d++) {
        vf rows[R];
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) rows[r] = load(q + d * L + r * W);
#pragma GCC unroll 16
        for (int j = 0; j < NB; j++) {
            const vf key = set1(k[j * k_stride + d]);
#pragma GCC unroll 3
            for (int r = 0; r < R; r++) sums[j][r] = fma(key, rows[r], sums[j][r]);
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < NB; j++)
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) {
            float* at = scores + j * L + r * W;
            store(at, add ? load(at) + sums[j][r] : sums[j][r]);
        }
}

template <int R>
WA_INLINE void weigh_columns(const float* weights, const float* v, int64_t D, int from, int to, float* acc,
                             const float* rescale) {
    constexpr int NB = kBlockOf<R>, L = R * W;
    vf sums[NB][R];
#pragma GCC unroll 16
    for (int j = 0; j < NB; j++)
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) sums[j][r] = set1(0.f);
    for (int k = from; k < to; k++) {
        vf rows[R];
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) rows[r] = load(weights + k * L + r * W);
#pragma GCC unroll 16
        for (int j = 0; j < NB; j++) {
            const vf value = set1(v[k * D + j]);
#pragma GCC unroll 3
            for (int r = 0; r < R; r++) sums[j][r] = fma(value, rows[r], sums[j][r]);
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < NB; j++)
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) {
            float* at = acc + j * L + r * W;
            store(at, fma(load(at), load(rescale + r * W), sums[j][r]));
        }
}

template <int QkDtype, int Form>
class FmaEngine {
    const WaCall& call;
    const Block& block;
    const int padded;
    const uint16_t* keys;
    ValueRows<Form> values;
    float *queries, *accumulators;  // panel after panel: [D][L] with the panel's own L
    float *k_tile, *v_tile;         // [tile_keys][D]
    float* weights;                 // panel after panel: [tile_keys][L]

  public:
    static constexpr int tile_keys = 64, max_vectors = 3;
    OddKeys odd_values;

    static int block_rows(int64_t D) { return D > 256 ? 96 : 192; }
    static size_t bytes(int64_t D, int rows) {
        return ((2 * rows + 2 * tile_keys) * D + rows * tile_keys) * sizeof(float) + 256;
    }
    static void enter_thread() {}
    static void leave_thread() {}

    FmaEngine(const WaCall& call, const Block& block, int padded, Arena& arena)
        : call(call), block(block), padded(padded), values(call, block.b, block.kv_head) {
        keys = (const uint16_t*)call.k.data + block.b * call.k.batch + block.kv_head * call.k.head;
        queries = arena.take<float>(padded * call.D);
        accumulators = arena.take<float>(padded * call.D);
        k_tile = arena.take<float>(tile_keys * call.D);
        v_tile = arena.take<float>(tile_keys * call.D);
        weights = arena.take<float>(padded * tile_keys);
    }

    // Element d of a row lies at lane_of(row)[d * L].
    template <class Visit>
    void each_panel(Visit visit) {
        for (int row = 0; row < padded;) {
            const int L = panel_vectors<max_vectors>((padded - row) / W) * W;
            visit(row, L);
            row += L;
        }
    }

    void pack_queries() {
        each_panel([&](int row0, int L) {
            for (int lane = 0; lane < L; lane++) {
                float* to = queries + row0 * call.D + lane;
                const int row = row0 + lane;
                if (row >= block.rows) {
                    for (int64_t d = 0; d < call.D; d++) to[d * L] = 0.f;
                    continue;
                }
                const uint16_t* from = (const uint16_t*)call.q.data + block.b * call.q.batch +
                                       block.head(row) * call.q.head + block.query(row) * call.q.row;
                for (int64_t d = 0; d < call.D; d += W) {
                    alignas(64) float wide[W];
                    store(wide, widen<QkDtype>(from + d));
                    for (int j = 0; j < W; j++) to[(d + j) * L] = wide[j];
                }
            }
        });
    }

    void clear() { memset(accumulators, 0, padded * call.D * sizeof(float)); }

    void begin_tile(int64_t key0, int from, int to) {
        odd_values.clear();
        const int padded_from = from / 32 * 32, padded_to = (to + 31) / 32 * 32;
        vf odd = set1(0.f);
        for (int k = padded_from; k < padded_to; k++) {
            float *k_row = k_tile + k * call.D, *v_row = v_tile + k * call.D;
            if (k < from || k >= to) {
                memset(k_row, 0, call.D * sizeof(float));
                memset(v_row, 0, call.D * sizeof(float));
                continue;
            }
            const uint16_t* k_from = keys + (key0 + k) * call.k.row;
            const char* v_from = values.row(key0 + k);
            for (int64_t d = 0; d < call.D; d += W) store(k_row + d, widen<QkDtype>(k_from + d));
            for (int64_t d0 = 0; d0 < call.D; d0 += 256) {
                const float weight = values.weight(key0 + k, d0 / 256);
                for (int64_t d = d0; d < smaller(d0 + 256, call.D); d += W) {
                    const vf x = values.values(v_from, d, weight);
                    odd = fma(x, set1(0.f), odd);  // NaN from the first non-finite value on
                    store(v_row + d, x);
                }
            }
        }
        if (any_nan(odd)) set_aside_odd_values(from, to);
    }

    void expect_tile(int64_t, int, int) {}
    void finish_values() {}

    float* scores_of(int row) const { return weights + row * tile_keys; }

    template <int R>
    void scores(int row, int from, int to, float* out) {
        constexpr int NB = kBlockOf<R>, L = R * W;
        const float* q = queries + row * call.D;
        const int chain = smaller(kChain, int(call.D));
        for (int64_t d = 0; d < call.D; d += chain)
            for (int k = from; k < to; k += NB)
                dot_chain<R>(q + d * L, k_tile + k * call.D + d, call.D, chain, out + k * L, d > 0);
    }

    template <int R>
    void keep_weights(int, int, int, const float*) {}

    template <int R>
    void accumulate(int row, int from, int to, const float* rescale) {
        constexpr int NB = kBlockOf<R>, L = R * W;
        float* acc = accumulators + row * call.D;
        for (int64_t d = 0; d < call.D; d += NB)
            weigh_columns<R>(scores_of(row), v_tile + d, call.D, from, to, acc + d * L, rescale);
    }

    void export_rows(float* to) {
        each_panel([&](int row0, int L) {
            for (int row = row0; row < smaller(row0 + L, block.rows); row++) {
                const float* from = accumulators + row0 * call.D + (row - row0);
                for (int64_t d = 0; d < call.D; d++) to[row * call.D + d] = from[d * L];
            }
        });
    }

  private:
    // 0 * NaN is NaN: zeros in the place of a non-finite row keep it from rows that do not see its key.
    void set_aside_odd_values(int from, int to) {
        for (int k = from; k < to; k++) {
            float* row = v_tile + k * call.D;
            vf odd = set1(0.f);
            for (int64_t d = 0; d < call.D; d += W) odd = fma(load(row + d), set1(0.f), odd);
            if (!any_nan(odd)) continue;
            odd_values.add(k);
            memset(row, 0, call.D * sizeof(float));
        }
    }
};

}  // namespace warmattn::WA_ISA

extern "C" int WA_CONCAT(warmattn_attend_, WA_ISA)(const WaCall* call) {
    return warmattn::WA_ISA::attend_call<warmattn::WA_ISA::FmaEngine>(*call);
}
