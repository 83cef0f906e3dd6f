// One f32 vector type per instruction set, with the few operations that the kernels need.
//
// Every operation is one IEEE operation per lane, so that AVX-512, AVX2 and NEON builds give the same bits. Portable
// C++ has bits of its own, the same on every processor: it has no fused multiply-add to rely on.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(WA_NEON)
#include <arm_neon.h>
#endif

#define WA_INLINE static inline __attribute__((always_inline))
#define WA_CONCAT_(a, b) a##b
#define WA_CONCAT(a, b) WA_CONCAT_(a, b)
#define WA_INLINE_MEMBER inline __attribute__((always_inline))

namespace warmattn::WA_ISA {

// Own min and max: the standard ones could be emitted once for all objects, built for the wrong instruction set.
template <class T>
WA_INLINE T smaller(T a, T b) { return b < a ? b : a; }
template <class T>
WA_INLINE T larger(T a, T b) { return a < b ? b : a; }

WA_INLINE float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

WA_INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // Scaling by 2^112 re-biases the exponent and normalises subnormals, exactly.
    return bits_to_float(sign | magnitude << 13) * 0x1p112f;
}

WA_INLINE float bf16_to_float(uint16_t h) { return bits_to_float(uint32_t(h) << 16); }

#if defined(__AVX512F__)

constexpr int W = 16;
using vf = __m512;
using vi = __m512i;
using vmask = __mmask16;

WA_INLINE vf load(const float* p) { return _mm512_load_ps(p); }
WA_INLINE vf loadu(const float* p) { return _mm512_loadu_ps(p); }
WA_INLINE void store(float* p, vf x) { _mm512_store_ps(p, x); }
WA_INLINE void storeu(float* p, vf x) { _mm512_storeu_ps(p, x); }
WA_INLINE vi load_int(const int32_t* p) { return _mm512_load_si512(p); }
WA_INLINE vf set1(float x) { return _mm512_set1_ps(x); }
WA_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
// max(x, y), and y where x is NaN
WA_INLINE vf max_or_second(vf x, vf y) { return _mm512_max_ps(x, y); }
WA_INLINE vmask less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
WA_INLINE vf choose(vmask m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }
WA_INLINE vmask key_in_range(int32_t key, vi lo, vi hi) {
    const vi k = _mm512_set1_epi32(key);
    return _mm512_mask_cmplt_epi32_mask(_mm512_cmple_epi32_mask(lo, k), k, hi);
}
WA_INLINE vmask bit_is_set(vi words, int bit) {
    return _mm512_test_epi32_mask(words, _mm512_set1_epi32(int32_t(1u << bit)));
}
WA_INLINE bool any_nan(vf x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
WA_INLINE vf absolute(vf x) { return _mm512_abs_ps(x); }
WA_INLINE vf copy_sign(vf magnitude, vf sign) {
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(sign),
                                                         _mm512_castps_si512(magnitude), 0xCA));
}
// y * 2^n where n sits in the low bits of t (see exp2_scaled)
WA_INLINE vf add_exponent(vf y, vf t) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}
WA_INLINE vf widen_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
WA_INLINE vf widen_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
WA_INLINE vf look_up(const float* table, vi index) { return _mm512_i32gather_ps(index, table, 4); }
WA_INLINE vf look_up(const float* table, const uint8_t* codes) {
    return look_up(table, _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes)));
}
WA_INLINE vf look_up_32(const float* table, vi index) {
    return _mm512_permutex2var_ps(loadu(table), index, loadu(table + 16));
}
WA_INLINE vi whole_numbers(int32_t n) { return _mm512_set1_epi32(n); }
WA_INLINE vi minus(vi a, vi b) { return _mm512_sub_epi32(a, b); }
WA_INLINE vi child(vi node, vf boundary, vf u) {
    return _mm512_add_epi32(_mm512_add_epi32(node, node), _mm512_maskz_set1_epi32(less(boundary, u), 1));
}
WA_INLINE void store_bytes(uint8_t* p, vi x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }
WA_INLINE float first_lane(vf x) { return _mm512_cvtss_f32(x); }
template <int H>
WA_INLINE vf swap_lanes(vf x) {
    if constexpr (H == 1) return _mm512_permute_ps(x, 0xB1);
    if constexpr (H == 2) return _mm512_permute_ps(x, 0x4E);
    if constexpr (H == 4) return _mm512_shuffle_f32x4(x, x, 0xB1);
    if constexpr (H == 8) return _mm512_shuffle_f32x4(x, x, 0x4E);
}

#elif defined(__AVX2__)

constexpr int W = 8;
using vf = __m256;
using vi = __m256i;
using vmask = __m256;

WA_INLINE vf load(const float* p) { return _mm256_load_ps(p); }
WA_INLINE vf loadu(const float* p) { return _mm256_loadu_ps(p); }
WA_INLINE void store(float* p, vf x) { _mm256_store_ps(p, x); }
WA_INLINE void storeu(float* p, vf x) { _mm256_storeu_ps(p, x); }
WA_INLINE vi load_int(const int32_t* p) { return _mm256_load_si256((const __m256i*)p); }
WA_INLINE vf set1(float x) { return _mm256_set1_ps(x); }
WA_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
WA_INLINE vf max_or_second(vf x, vf y) { return _mm256_max_ps(x, y); }
WA_INLINE vmask less(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
WA_INLINE vf choose(vmask m, vf yes, vf no) { return _mm256_blendv_ps(no, yes, m); }
WA_INLINE vmask key_in_range(int32_t key, vi lo, vi hi) {
    const vi k = _mm256_set1_epi32(key);
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpgt_epi32(lo, k), _mm256_cmpgt_epi32(hi, k)));
}
WA_INLINE vmask bit_is_set(vi words, int bit) {
    const vi b = _mm256_set1_epi32(int32_t(1u << bit));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(words, b), b));
}
WA_INLINE bool any_nan(vf x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0; }
WA_INLINE vf absolute(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), x); }
WA_INLINE vf copy_sign(vf magnitude, vf sign) {
    return _mm256_or_ps(_mm256_and_ps(_mm256_set1_ps(-0.f), sign), absolute(magnitude));
}
WA_INLINE vf add_exponent(vf y, vf t) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(y), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
WA_INLINE vf widen_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
WA_INLINE vf widen_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
WA_INLINE vf look_up(const float* table, vi index) { return _mm256_i32gather_ps(table, index, 4); }
WA_INLINE vf look_up(const float* table, const uint8_t* codes) {
    return look_up(table, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)codes)));
}
WA_INLINE vf look_up_32(const float* table, vi index) { return look_up(table, index); }
WA_INLINE vi whole_numbers(int32_t n) { return _mm256_set1_epi32(n); }
WA_INLINE vi minus(vi a, vi b) { return _mm256_sub_epi32(a, b); }
WA_INLINE vi child(vi node, vf boundary, vf u) {
    return _mm256_sub_epi32(_mm256_add_epi32(node, node), _mm256_castps_si256(less(boundary, u)));
}
WA_INLINE void store_bytes(uint8_t* p, vi x) {
    alignas(32) int32_t lanes[8];
    _mm256_store_si256((__m256i*)lanes, x);
    for (int i = 0; i < 8; i++) p[i] = uint8_t(lanes[i]);
}
WA_INLINE float first_lane(vf x) { return _mm256_cvtss_f32(x); }
template <int H>
WA_INLINE vf swap_lanes(vf x) {
    if constexpr (H == 1) return _mm256_permute_ps(x, 0xB1);
    if constexpr (H == 2) return _mm256_permute_ps(x, 0x4E);
    if constexpr (H == 4) return _mm256_permute2f128_ps(x, x, 1);
}

#else  // NEON (where the build asks for it by WA_NEON), and portable C++ through the compiler's vector extensions

constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef float vf_unaligned __attribute__((vector_size(16), aligned(4)));
using vmask = vi;

WA_INLINE vf load(const float* p) { return *(const vf*)p; }
WA_INLINE vf loadu(const float* p) { return *(const vf_unaligned*)p; }
WA_INLINE void store(float* p, vf x) { *(vf*)p = x; }
WA_INLINE void storeu(float* p, vf x) { *(vf_unaligned*)p = x; }
WA_INLINE vi load_int(const int32_t* p) { return *(const vi*)p; }
WA_INLINE vf set1(float x) { return vf{x, x, x, x}; }
#if defined(WA_NEON)
WA_INLINE vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
WA_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }  // two roundings: no fused instruction to rely on
#endif
WA_INLINE vf choose(vmask m, vf yes, vf no) { return (vf)(((vi)yes & m) | ((vi)no & ~m)); }
WA_INLINE vf max_or_second(vf x, vf y) { return choose((vmask)(x > y), x, y); }
WA_INLINE vmask less(vf a, vf b) { return (vmask)(a < b); }
WA_INLINE vmask key_in_range(int32_t key, vi lo, vi hi) {
    const vi k = {key, key, key, key};
    return (vmask)(lo <= k) & (vmask)(k < hi);
}
WA_INLINE vmask bit_is_set(vi words, int bit) {
    const int32_t b = int32_t(1u << bit);
    return (vmask)((words & vi{b, b, b, b}) != vi{});
}
WA_INLINE bool any_nan(vf x) { return x[0] != x[0] || x[1] != x[1] || x[2] != x[2] || x[3] != x[3]; }
WA_INLINE vf absolute(vf x) { return (vf)((vi)x & INT32_MAX); }
WA_INLINE vf copy_sign(vf magnitude, vf sign) { return (vf)(((vi)sign & INT32_MIN) | ((vi)magnitude & INT32_MAX)); }
WA_INLINE vf add_exponent(vf y, vf t) {
    typedef uint32_t vu __attribute__((vector_size(16)));  // unsigned: these bits may wrap
    return (vf)((vu)y + ((vu)t << 23));
}
#if defined(WA_NEON)
WA_INLINE vf widen_half(const uint16_t* p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
#else
WA_INLINE vf widen_half(const uint16_t* p) {
    return vf{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
#endif
WA_INLINE vf widen_bf16(const uint16_t* p) {
    return vf{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
}
WA_INLINE vf look_up(const float* table, vi index) {
    return vf{table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
}
WA_INLINE vf look_up(const float* table, const uint8_t* codes) {
    return vf{table[codes[0]], table[codes[1]], table[codes[2]], table[codes[3]]};
}
WA_INLINE vf look_up_32(const float* table, vi index) { return look_up(table, index); }
WA_INLINE vi whole_numbers(int32_t n) { return vi{n, n, n, n}; }
WA_INLINE vi minus(vi a, vi b) { return a - b; }
WA_INLINE vi child(vi node, vf boundary, vf u) { return node + node - less(boundary, u); }
WA_INLINE void store_bytes(uint8_t* p, vi x) {
    for (int i = 0; i < 4; i++) p[i] = uint8_t(x[i]);
}
WA_INLINE float first_lane(vf x) { return x[0]; }
template <int H>
WA_INLINE vf swap_lanes(vf x) {
    if constexpr (H == 1) return vf{x[1], x[0], x[3], x[2]};
    if constexpr (H == 2) return vf{x[2], x[3], x[0], x[1]};
}

#endif

// -x in the lanes whose bit H is set.
template <int H>
WA_INLINE vf negate_lanes(vf x) {
#define WA_SIGN(lane) ((lane) & H ? -1.f : 1.f)
    alignas(64) static const float signs[16] = {
        WA_SIGN(0), WA_SIGN(1), WA_SIGN(2),  WA_SIGN(3),  WA_SIGN(4),  WA_SIGN(5),  WA_SIGN(6),  WA_SIGN(7),
        WA_SIGN(8), WA_SIGN(9), WA_SIGN(10), WA_SIGN(11), WA_SIGN(12), WA_SIGN(13), WA_SIGN(14), WA_SIGN(15)};
#undef WA_SIGN
    return x * load(signs);
}

}  // namespace warmattn::WA_ISA
