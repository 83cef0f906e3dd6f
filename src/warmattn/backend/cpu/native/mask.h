// An external mask, turned into one word of bits per row and 32 keys; finite cells are fetched only where there are any.
#pragma once
#include "rows.h"

namespace warmattn::WA_ISA {

constexpr int kMapRows = 32, kMapKeys = 16;  // a tile of the tile map
enum MapKind { kHidden = 0, kMixed = 1, kOpen = 2 };

WA_INLINE uint32_t low_bits(int n) { return n >= 32 ? ~0u : (1u << n) - 1; }

// What up to 32 cells say: bit j of `seen` is set where cell j shows its key, `adds` where a cell is finite and not 0.
struct CellBits {
    uint32_t seen, adds;
};

WA_INLINE CellBits read_half_cells(const uint16_t* cells, int64_t stride, int count) {
#if defined(__AVX512BW__)
    if (stride == 1) {
        const __mmask32 in_range = low_bits(count);
        const __m512i h = _mm512_maskz_loadu_epi16(in_range, cells);
        const uint32_t seen = _mm512_mask_cmpneq_epi16_mask(in_range, h, _mm512_set1_epi16(int16_t(0xfc00)));
        return {seen, seen & _mm512_test_epi16_mask(h, _mm512_set1_epi16(0x7fff))};
    }
#endif
    CellBits bits = {0, 0};
    for (int j = 0; j < count; j++) {
        const uint16_t h = cells[j * stride];
        const uint32_t is_seen = h != 0xfc00;  // of all f16 values only -inf lies at or below -1e30
        bits.seen |= is_seen << j;
        bits.adds |= (is_seen & uint32_t((h & 0x7fff) != 0)) << j;
    }
    return bits;
}

WA_INLINE CellBits read_bool_cells(const uint8_t* cells, int64_t stride, int count) {
    CellBits bits = {0, 0};
    for (int j = 0; j < count; j++) bits.seen |= uint32_t(cells[j * stride] != 0) << j;
    return bits;
}

struct Mask {
    const WaCall& call;
    int64_t b, kv_head, group;

    // Cells of packed row `row` (query row / group, head row % group) from `key` on, in bytes of the mask.
    WA_INLINE_MEMBER const char* cells(int64_t row, int64_t key) const {
        const WaOperand& m = call.mask;
        const int64_t head = kv_head * group + row % group;
        const int64_t offset = b * m.batch + head * m.head + row / group * m.row + key * m.last;
        return (const char*)m.data + offset * (call.mask_dtype == WA_BOOL ? 1 : 2);
    }

    WA_INLINE_MEMBER CellBits read(int64_t row, int64_t key, int count) const {
        if (call.mask_dtype == WA_BOOL) return read_bool_cells((const uint8_t*)cells(row, key), call.mask.last, count);
        return read_half_cells((const uint16_t*)cells(row, key), call.mask.last, count);
    }

    // The bits of `count` <= 32 cells, asking the tile map first; `key` is a multiple of 16.
    CellBits bits(int64_t row, int64_t key, int count) const {
        if (!call.tile_map) return read(row, key, count);
        const uint8_t* kinds = call.tile_map + row / group / kMapRows * call.map_columns;
        CellBits all = {0, 0};
        for (int from = 0; from < count; from += kMapKeys) {
            const int n = smaller(kMapKeys, count - from);
            const uint8_t kind = kinds[(key + from) / kMapKeys];
            if (kind == kHidden) continue;
            const CellBits part = kind == kOpen ? CellBits{low_bits(n), 0} : read(row, key + from, n);
            all.seen |= part.seen << from;
            all.adds |= part.adds << from;
        }
        return all;
    }

    float addend(int64_t row, int64_t key) const {
        return half_to_float(*(const uint16_t*)cells(row, key));
    }
};

}  // namespace warmattn::WA_ISA
