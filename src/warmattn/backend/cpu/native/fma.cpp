// The FMA family: f32 products on vectors of rows, for AVX-512, AVX2, NEON and portable C++ (WA_ISA names the build).
//
// K and V tiles are widened to f32 in cache; a register block holds NB keys (or columns of V) x R vectors of rows.
// Sums are cut into chains, at most 64 products of a dot and one tile's keys of P.V, and then added: shorter chains
// round less, and every element's order of additions is fixed.
#include "attention.h"

namespace warmattn::WA_ISA {

constexpr int kChain = 64;
constexpr int kLine = 16;  // columns of V that lie together

template <int R>
constexpr int kBlockOf = W == 8 ? (R == 1 ? 8 : 4) : (R == 1 ? 16 : 8);

template <int R>
WA_INLINE void dot_chain(const float* q, const float* k, float* scores, bool add) {
    constexpr int NB = kBlockOf<R>, L = R * W;
    vf sums[NB][R];
#pragma GCC unroll 16
    for (int j = 0; j < NB; j++)
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) sums[j][r] = set1(0.f);
    for (int d = 0; d < kChain; d++) {
        vf rows[R];
#pragma GCC unroll 3
        for (int r = 0; r < R; r++) rows[r] = load(q + d * L + r * W);
#pragma GCC unroll 16
        for (int j = 0; j < NB; j++) {
            const vf key = set1(k[j * kChain + d]);
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
WA_INLINE void weigh_columns(const float* weights, const float* v, int from, int to, float* acc, const float* rescale) {
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
            const vf value = set1(v[k * kLine + j]);
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

// As weigh_columns for N rows that would fill few lanes: the lanes hold columns of V, the rows' weights are spread over
// them, and every sum is the same. acc is [row][D], and v the lines of V that begin with these columns.
template <int N>
WA_INLINE void weigh_rows(const float* weights, const float* v, int64_t D, int from, int to, float* acc,
                          const float* rescale) {
    vf sums[N][kLine / W];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int c = 0; c < kLine / W; c++) sums[n][c] = set1(0.f);
    for (int k = from; k < to; k++)
#pragma GCC unroll 4
        for (int c = 0; c < kLine / W; c++) {
            const vf value = load(v + k * kLine + c * W);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[n][c] = fma(value, set1(weights[k * W + n]), sums[n][c]);
        }
#pragma GCC unroll 8
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int c = 0; c < kLine / W; c++) {
            float* at = acc + n * D + c * W;
            store(at, fma(load(at), set1(rescale[n]), sums[n][c]));
        }
}

template <int QkDtype, int Form>
class FmaEngine {
    const WaCall& call;
    const Block& block;
    const int padded;
    const uint16_t* keys;
    ValueRows<Form> values;
    const bool thin;                // few rows: accumulators are [row][D]
    float *queries, *accumulators;  // panel after panel: [D][L] with the panel's own L
    float* k_tile;                  // [D / kChain][tile_keys][kChain]
    float* v_tile;                  // [D / kLine][tile_keys][kLine]
    float* weights;                 // panel after panel: [tile_keys][L]

  public:
    static constexpr int tile_keys = 64, max_vectors = 3;
    OddKeys odd_values;

    static int block_rows(int64_t) { return 192; }
    static size_t bytes(int64_t D, int rows) {
        return ((2 * rows + 2 * tile_keys) * D + rows * tile_keys) * sizeof(float) + 256;
    }
    static void enter_thread() {}
    static void leave_thread() {}

    FmaEngine(const WaCall& call, const Block& block, int padded, Arena& arena)
        : call(call),
          block(block),
          padded(padded),
          values(call, block.b, block.kv_head),
          thin(W > 4 && block.rows <= W / 2) {
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
            if (k < from || k >= to) {
                for (int64_t d = 0; d < call.D; d += W) {
                    store(key_at(k, d), set1(0.f));
                    store(value_at(k, d), set1(0.f));
                }
                continue;
            }
            const uint16_t* k_from = keys + (key0 + k) * call.k.row;
            const char* v_from = values.row(key0 + k);
            for (int64_t d = 0; d < call.D; d += W) store(key_at(k, d), widen<QkDtype>(k_from + d));
            for (int64_t d0 = 0; d0 < call.D; d0 += 256) {
                const float weight = values.weight(key0 + k, d0 / 256);
                for (int64_t d = d0; d < smaller(d0 + 256, call.D); d += W) {
                    const vf x = values.values(v_from, d, weight);
                    odd = fma(x, set1(0.f), odd);  // NaN from the first non-finite value on
                    store(value_at(k, d), x);
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
        for (int64_t d = 0; d < call.D; d += kChain)
            for (int k = from; k < to; k += NB) dot_chain<R>(q + d * L, key_at(k, d), out + k * L, d > 0);
    }

    template <int R>
    void keep_weights(int, int, int, const float*) {}

    template <int R>
    void accumulate(int row, int from, int to, const float* rescale) {
        constexpr int NB = kBlockOf<R>, L = R * W;
        float* acc = accumulators + row * call.D;
        if (R == 1 && thin) {
            for (int64_t d = 0; d < call.D; d += kLine) {
                const auto weigh = [&](auto N, int n) {
                    weigh_rows<N>(weights + n, value_at(0, d), call.D, from, to, acc + n * call.D + d, rescale + n);
                };
                int n = 0;
                for (; n + 4 <= block.rows; n += 4) weigh(std::integral_constant<int, 4>(), n);
                for (; n < block.rows; n++) weigh(std::integral_constant<int, 1>(), n);
            }
            return;
        }
        for (int64_t d = 0; d < call.D; d += NB)
            weigh_columns<R>(scores_of(row), value_at(0, d), from, to, acc + d * L, rescale);
    }

    void export_rows(float* to) {
        if (thin) {
            memcpy(to, accumulators, size_t(block.rows) * call.D * sizeof(float));
            return;
        }
        each_panel([&](int row0, int L) {
            for (int row = row0; row < smaller(row0 + L, block.rows); row++) {
                const float* from = accumulators + row0 * call.D + (row - row0);
                for (int64_t d = 0; d < call.D; d++) to[row * call.D + d] = from[d * L];
            }
        });
    }

  private:
    float* key_at(int key, int64_t d) const { return k_tile + (d / kChain * tile_keys + key) * kChain + d % kChain; }
    float* value_at(int key, int64_t d) const { return v_tile + (d / kLine * tile_keys + key) * kLine + d % kLine; }

    // 0 * NaN is NaN: zeros in the place of a non-finite row keep it from rows that do not see its key.
    void set_aside_odd_values(int from, int to) {
        for (int k = from; k < to; k++) {
            vf odd = set1(0.f);
            for (int64_t d = 0; d < call.D; d += W) odd = fma(load(value_at(k, d)), set1(0.f), odd);
            if (!any_nan(odd)) continue;
            odd_values.add(k);
            for (int64_t d = 0; d < call.D; d += W) store(value_at(k, d), set1(0.f));
        }
    }
};

}  // namespace warmattn::WA_ISA

extern "C" int WA_CONCAT(warmattn_attend_, WA_ISA)(const WaCall* call) {
    return warmattn::WA_ISA::attend_call<warmattn::WA_ISA::FmaEngine>(*call);
}
