// The streaming softmax of one tile of scores: rows in lanes, keys one after the other.
//
// Scores lie as [key][L], L rows wide, so that maximum, exponential and sum need no step across lanes: each lane is
// one query row, and its bits depend on nothing in its neighbours.
#pragma once
#include "vec.h"

namespace warmattn::WA_ISA {

// Smallest exponent of a weight that is kept; below 2^-126 a weight is 0.
constexpr float kLowestExponent = -126.f;

// 2^(x * factor) for x <= 0 within 1e-7; `lowest` = largest of -126 / factor and the lowest finite float.
// The product is never rounded: n = round(x * factor), r = x * factor - n in one fused step, 2^r by a polynomial
// (coefficients: minimax on [-1/2, 1/2], relative error 2e-8 as rounded), and 2^n goes into the exponent bits.
// NaN stays NaN; 2^0 is exactly 1.
WA_INLINE vf exp2_scaled(vf x, vf factor, vf lowest) {
    const vf rounder = set1(12582912.f);  // 1.5 * 2^23: adding it leaves round(t) in the low mantissa bits
    const vf clamped = max_or_second(lowest, x);
    const vf t = fma(clamped, factor, rounder);
    const vf n = t - rounder;
    const vf r = fma(clamped, factor, -n);
    vf p = set1(1.53533620e-4f);
    p = fma(p, r, set1(1.33988750e-3f));
    p = fma(p, r, set1(9.61843692e-3f));
    p = fma(p, r, set1(5.55033237e-2f));
    p = fma(p, r, set1(2.40226477e-1f));
    p = fma(p, r, set1(6.93147182e-1f));
    p = fma(p, r, set1(1.f));
    return choose(less(x, lowest), set1(0.f), add_exponent(p, t));
}

// tanh within 2e-7: Cephes' polynomial near 0 (Moshier, tanhf), else (1 - e) / (1 + e) with e = exp(-2|x|).
WA_INLINE vf tanh_of(vf x) {
    const vf size = absolute(x);
    const vf z = x * x;
    vf p = set1(-5.70498872745e-3f);
    p = fma(p, z, set1(2.06390887954e-2f));
    p = fma(p, z, set1(-5.37397155531e-2f));
    p = fma(p, z, set1(1.33314422036e-1f));
    p = fma(p, z, set1(-3.33332819422e-1f));
    const vf near_zero = fma(p * z, x, x);
    const float factor = 2.8853900817779268f;  // 2 log2 e
    const vf e = exp2_scaled(-size, set1(factor), set1(kLowestExponent / factor));
    const vf far = copy_sign((set1(1.f) - e) / (set1(1.f) + e), x);
    return choose(less(size, set1(0.625f)), near_zero, far);
}

// What the rows of a panel see of a tile.
struct TileView {
    const int32_t *first, *end;  // [L]: keys first <= key < end are seen
    int32_t key0;                // key of the tile's row 0
    bool whole;                  // every row sees every key in question: nothing to hide
    const uint32_t* words;       // external mask: bit k % 32 of words[k / 32 * L + row]; replaces first and end
    const float* cells;          // finite mask cells to add, [key][L], or null
};

struct SoftmaxScale {
    float factor;     // weight of a score difference x: 2^(x * factor)
    float lowest;     // see exp2_scaled
    float per_cell;   // a mask cell counts cell / per_cell in the domain of the scores
    float cap, to_cap;  // scores become cap * tanh(score * to_cap) when cap > 0
};

template <int L>
WA_INLINE bool sees(const TileView& view, int key, int lane) {
    if (view.words) return view.words[key / 32 * L + lane] >> (key % 32) & 1;
    return view.first[lane] <= view.key0 + key && view.key0 + key < view.end[lane];
}

// One vector of rows, keys [begin, end): scores become weights in place; maximum and sum advance; `rescale` receives
// what the rows' earlier weights are to be multiplied by.
template <int L>
WA_INLINE void softmax_rows(float* scores, int begin, int end, int lane, const TileView& view,
                            const SoftmaxScale& scale, float* maximum, float* sum, float* rescale) {
    const vf hidden = set1(-INFINITY);
    const vf old_maximum = load(maximum + lane);
    // Four chains, by key modulo 4: a fixed order that does not wait for the previous addition.
    vf tops[4] = {old_maximum, old_maximum, old_maximum, old_maximum};
    if (view.whole && !(scale.cap > 0.f)) {
        for (int k = begin; k < end; k += 4)
            for (int j = 0; j < 4; j++) tops[j] = max_or_second(load(scores + (k + j) * L + lane), tops[j]);
    } else {
        const vi first = load_int(view.first + lane), stop = load_int(view.end + lane);
        for (int k = begin; k < end; k++) {
            float* at = scores + k * L + lane;
            vf s = load(at);
            if (scale.cap > 0.f) s = set1(scale.cap) * tanh_of(s * set1(scale.to_cap));
            if (view.cells) s = s + load(view.cells + k * L + lane) / set1(scale.per_cell);
            if (view.words)
                s = choose(bit_is_set(load_int((const int32_t*)view.words + k / 32 * L + lane), k % 32), s, hidden);
            else if (!view.whole)
                s = choose(key_in_range(view.key0 + k, first, stop), s, hidden);
            store(at, s);
            tops[k & 3] = max_or_second(s, tops[k & 3]);
        }
    }
    const vf top = max_or_second(max_or_second(tops[0], tops[1]), max_or_second(tops[2], tops[3]));
    // A row that has seen nothing keeps -inf; subtracting a finite base there gives 2^-inf = 0, not NaN.
    const vf base = max_or_second(top, set1(-3.4028234664e38f));
    const vf factor = set1(scale.factor), lowest = set1(scale.lowest);
    const vf shrink = exp2_scaled(old_maximum - base, factor, lowest);
    vf sums[4] = {set1(0.f), set1(0.f), set1(0.f), set1(0.f)};
    for (int k = begin; k < end; k += 4)
        for (int j = 0; j < 4; j++) {
            float* at = scores + (k + j) * L + lane;
            const vf weight = exp2_scaled(load(at) - base, factor, lowest);
            store(at, weight);
            sums[j] = sums[j] + weight;
        }
    store(maximum + lane, top);
    store(rescale + lane, shrink);
    store(sum + lane, load(sum + lane) * shrink + ((sums[0] + sums[1]) + (sums[2] + sums[3])));
}

}  // namespace warmattn::WA_ISA
