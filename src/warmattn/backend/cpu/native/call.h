// The C interface of the CPU kernels: one struct per call, filled by `native.py`, which mirrors it field by field.
//
// Strides count elements. The last axis (D) of q, k, v, codes and out is contiguous; masks and norms may have any
// strides. Python checked every operand before it comes here.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum WaDtype { WA_F16 = 0, WA_BF16 = 1, WA_F32 = 2, WA_CODES = 3, WA_BOOL = 4 };
enum WaKind { WA_FULL = 0, WA_CAUSAL = 1, WA_WINDOW = 2, WA_EXTERNAL = 3 };

typedef struct {
    const void* data;
    int64_t batch, head, row, last;  // strides
} WaOperand;

typedef struct {
    int64_t B, H, Hk, S, D;
    WaOperand q, k, v;
    WaOperand norms;            // row = key, last = block of 256 values
    WaOperand mask;             // row = query, last = key
    const uint8_t* tile_map;    // [ceil(S/32), map_columns], or null
    int64_t map_columns;
    const float* centroids;     // 256 entries, indexed by the whole code byte
    const int64_t* q_offset;    // [B], relative to K's row 0
    const int64_t* kv_len;      // [B]
    const int64_t* kv_start;    // [B]
    int64_t window;
    float* out;                 // run: [B, H, S, D] by these strides
    int64_t out_batch, out_head, out_row;
    int64_t first_split, splits;  // run_partials: the splits that are exported
    float *maximum, *sum;       // run: [B, H, S] or null; run_partials: [splits, B, H, S]; contiguous
    float* accumulator;         // run: null; run_partials: [splits, B, H, S, D], contiguous
    double merge_factor;        // multiplies a difference of maxima in the merge law: the weight is 2^(factor * x)
    float factor;               // multiplies a difference of scores: the weight is 2^(factor * x)
    float scale, softcap;       // softcap 0: none
    float value_scale;          // fl32(1 / sqrt(D)) up to D = 256, sf at D = 512; codes only
    int32_t qk_dtype, v_form, kind, mask_dtype;
    int32_t threads;
} WaCall;

enum WaTask { WA_ENCODE = 0, WA_DECODE = 1, WA_UNROTATE = 2 };

// One call of the codec over rows of D values. What is written is contiguous.
typedef struct {
    int64_t rank, D;
    const int64_t* sizes;        // [rank]: the leading axes
    const void* from;            // x, codes or o
    const int64_t* strides;      // [rank]
    int64_t last;                // stride of the last axis; 1 for codes
    const float* norms;          // decode: read
    const int64_t* norm_strides;  // [rank]
    int64_t norm_last;
    const float* signs;          // [D], contiguous; encode and unrotate
    const float* table;          // encode: the search tree, [2^bits]; decode: 256 centroids, indexed by the whole byte
    void* to;                    // codes or values
    float* norms_out;            // encode
    uint8_t* broken;             // encode: 1 where a row was not finite and became zeros
    float rsqrt_D;               // fl32(1 / sqrt(D))
    float scale;                 // encode: fl32(sqrt(D)) up to D = 256; at D = 512, and to decode, sf
    int32_t task, dtype, bits, threads;
} WaRows;

#ifdef __cplusplus
}
#endif
