// Reading rows of the operands: every dtype widened to f32 exactly, codes decoded by the codec's two roundings.
#pragma once
#include "call.h"
#include "vec.h"

namespace warmattn::WA_ISA {

template <int Dtype>
WA_INLINE vf widen(const uint16_t* p) {
    return Dtype == WA_F16 ? widen_half(p) : widen_bf16(p);
}

WA_INLINE float widen_one(int dtype, uint16_t h) { return dtype == WA_F16 ? half_to_float(h) : bf16_to_float(h); }

// Rows of one KV head's V. `values` gives W of them, from column d of a row.
template <int Form>
struct ValueRows {
    const char* data;
    int64_t stride;  // bytes
    const float* norms;
    int64_t norm_row, norm_block;
    const float* centroids;
    float value_scale;
    bool divides;  // D = 512: norm / sf; else norm * fl32(1/sqrt(D))

    static constexpr int64_t element_bytes = Form == WA_F32 ? 4 : Form == WA_CODES ? 1 : 2;

    ValueRows(const WaCall& call, int64_t b, int64_t kv_head)
        : data((const char*)call.v.data + (b * call.v.batch + kv_head * call.v.head) * element_bytes),
          stride(call.v.row * element_bytes),
          norms(Form == WA_CODES ? (const float*)call.norms.data + b * call.norms.batch + kv_head * call.norms.head
                                 : nullptr),
          norm_row(call.norms.row),
          norm_block(call.norms.last),
          centroids(call.centroids),
          value_scale(call.value_scale),
          divides(call.D > 256) {}

    WA_INLINE_MEMBER const char* row(int64_t key) const { return data + key * stride; }

    WA_INLINE_MEMBER float weight(int64_t key, int64_t block) const {
        if (Form != WA_CODES) return 1.f;
        const float norm = norms[key * norm_row + block * norm_block];
        return divides ? norm / value_scale : norm * value_scale;
    }

    WA_INLINE_MEMBER vf values(const char* row, int64_t d, float weight) const {
        if (Form == WA_F32) return loadu((const float*)row + d);
        if (Form == WA_F16) return widen_half((const uint16_t*)row + d);
        if (Form == WA_BF16) return widen_bf16((const uint16_t*)row + d);
        return look_up(centroids, (const uint8_t*)row + d) * set1(weight);
    }
};

}  // namespace warmattn::WA_ISA
