// The codec of V over rows: encode, decode and unrotate, the sequence of warmattn/codec/turboquant.py bit for bit.
//
// One row is worked on at a time, in a buffer of D values; a step across lanes of a vector is a swap of lanes and one
// IEEE operation, so that every build rounds as the sequence says.
#include <math.h>

#include "rows.h"

namespace warmattn::WA_ISA {

constexpr int kMostD = 512, kBlock = 256;

// Stage h < W of the transform within a vector: lane j becomes x[j] + x[j + h] where bit h of j is clear, else
// x[j - h] - x[j].
template <int H>
WA_INLINE vf butterfly_lanes(vf x) {
    return swap_lanes<H>(x) + negate_lanes<H>(x);
}

WA_INLINE vf transform_lanes(vf x) {
    x = butterfly_lanes<2>(butterfly_lanes<1>(x));
    if constexpr (W > 4) x = butterfly_lanes<4>(x);
    if constexpr (W > 8) x = butterfly_lanes<8>(x);
    return x;
}

// The Walsh-Hadamard transform of a row, unnormalised, h = 1, 2, 4, ...
static void transform(float* y, int D) {
    for (int d = 0; d < D; d += W) store(y + d, transform_lanes(load(y + d)));
    for (int h = W; h < D; h *= 2)
        for (int base = 0; base < D; base += 2 * h)
            for (int d = base; d < base + h; d += W) {
                const vf low = load(y + d), high = load(y + d + h);
                store(y + d, low + high);
                store(y + d + h, low - high);
            }
}

// The sum of squares of a block of `width` values, second half onto first until one is left.
static float sum_of_squares(const float* y, int width) {
    vf t[kBlock / W];
    const int vectors = width / W;
    for (int i = 0; i < vectors; i++) t[i] = load(y + i * W) * load(y + i * W);
    for (int half = vectors / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) t[i] = t[i] + t[i + half];
    vf sum = t[0];
    if constexpr (W > 8) sum = sum + swap_lanes<8>(sum);
    if constexpr (W > 4) sum = sum + swap_lanes<4>(sum);
    sum = sum + swap_lanes<2>(sum);
    sum = sum + swap_lanes<1>(sum);
    return first_lane(sum);
}

// One call over rows, and where each row lies.
struct Rows {
    const WaRows& call;
    const int D = int(call.D), width = smaller(D, kBlock), blocks = D / width;

    // Offset of a row under these strides of the leading axes.
    int64_t offset(int64_t row, const int64_t* strides) const {
        int64_t at = 0;
        for (int64_t axis = call.rank - 1; axis >= 0; axis--) {
            at += row % call.sizes[axis] * strides[axis];
            row /= call.sizes[axis];
        }
        return at;
    }

    template <int Dtype>
    void read(int64_t row, float* y) const {
        const int64_t at = offset(row, call.strides);
        if constexpr (Dtype == WA_F32) {
            const float* from = (const float*)call.from + at;
            for (int d = 0; d < D; d++) y[d] = from[d * call.last];
        } else {
            const uint16_t* from = (const uint16_t*)call.from + at;
            alignas(64) uint16_t gathered[kMostD];
            if (call.last != 1) {
                for (int d = 0; d < D; d++) gathered[d] = from[d * call.last];
                from = gathered;
            }
            for (int d = 0; d < D; d += W) store(y + d, widen<Dtype>(from + d));
        }
    }

    void scale(float* y, float factor) const {
        for (int d = 0; d < D; d += W) store(y + d, load(y + d) * set1(factor));
    }
    void flip_signs(float* y) const {
        for (int d = 0; d < D; d += W) store(y + d, load(y + d) * loadu(call.signs + d));
    }

    // Number of boundaries below each u, by a walk down the search tree: root at 1, children of k at 2k and 2k + 1.
    WA_INLINE_MEMBER vi count_below(vf u) const {
        vi node = whole_numbers(1);
        for (int level = 0; level < call.bits; level++) {
            const vf boundary = level < 5 ? look_up_32(call.table, node) : look_up(call.table, node);
            node = child(node, boundary, u);
        }
        return minus(node, whole_numbers(1 << call.bits));
    }

    template <int Dtype>
    void encode(int64_t row) const {
        alignas(64) float y[kMostD];
        read<Dtype>(row, y);
        flip_signs(y);
        transform(y, D);
        scale(y, call.rsqrt_D);
        float norms[kMostD / kBlock];
        bool broken = false;
        for (int block = 0; block < blocks; block++) {
            const float squares = sum_of_squares(y + block * width, width);
            norms[block] = sqrtf(blocks == 1 ? squares : squares * 0x1p-8f);
            broken |= !(norms[block] < INFINITY);
        }
        call.broken[row] = broken;
        uint8_t* codes = (uint8_t*)call.to + row * D;
        for (int block = 0; block < blocks; block++) {
            const float norm = broken ? 0.f : norms[block];
            call.norms_out[row * blocks + block] = norm;
            for (int d = block * width; d < (block + 1) * width; d += W) {
                const vf u = norm == 0.f ? set1(0.f) : load(y + d) * set1(call.scale) / set1(norm);
                store_bytes(codes + d, count_below(u));
            }
        }
    }

    void decode(int64_t row) const {
        const uint8_t* codes = (const uint8_t*)call.from + offset(row, call.strides);
        const float* norms = call.norms + offset(row, call.norm_strides);
        float* to = (float*)call.to + row * D;
        for (int block = 0; block < blocks; block++) {
            const float norm = norms[block * call.norm_last];
            const vf weight = set1(blocks == 1 ? norm * call.rsqrt_D : norm / call.scale);
            for (int d = block * width; d < (block + 1) * width; d += W)
                storeu(to + d, look_up(call.table, codes + d) * weight);
        }
    }

    void unrotate(int64_t row) const {
        alignas(64) float y[kMostD];
        read<WA_F32>(row, y);
        transform(y, D);
        scale(y, call.rsqrt_D);
        flip_signs(y);
        memcpy((float*)call.to + row * D, y, D * sizeof(float));
    }

    void work_on(int64_t row) const {
        if (call.task == WA_DECODE)
            decode(row);
        else if (call.task == WA_UNROTATE)
            unrotate(row);
        else if (call.dtype == WA_F16)
            encode<WA_F16>(row);
        else if (call.dtype == WA_BF16)
            encode<WA_BF16>(row);
        else
            encode<WA_F32>(row);
    }
};

}  // namespace warmattn::WA_ISA

extern "C" void WA_CONCAT(warmattn_rows_, WA_ISA)(const WaRows* call) {
    const warmattn::WA_ISA::Rows rows = {*call};
    int64_t count = 1;
    for (int64_t axis = 0; axis < call->rank; axis++) count *= call->sizes[axis];
#pragma omp parallel for num_threads(call->threads) schedule(static) if (count * call->D > 32768)
    for (int64_t row = 0; row < count; row++) rows.work_on(row);
}
