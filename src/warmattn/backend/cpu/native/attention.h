// The loop over work items, key splits, key tiles and panels of rows, written once for every kernel family.
//
// Rows: the H / Hk query heads of a KV head are packed, head after head within a query row, so that they share its
// tiles; up to Engine::block_rows of them form a block, and a block is worked on in panels of R vectors of rows.
// Keys: tiles of Engine::tile_keys and splits of kSplitKeys at absolute rows of K. What a row computes over a split is
// one partial result (maximum, sum, unnormalised accumulator); partials merge in key order by the one merge law, no
// matter which thread made them. So no bit depends on S, T, C, threads, or the rows that share a block.
//
// A tile is worked on in two passes over the panels: scores and softmax first, weighted values second. An engine may
// then load V during the first and the next tile's K during the second, where that costs nothing.
//
// An Engine holds one block's queries, one tile of K and V, and the accumulators, in whatever layout suits it:
//   tile_keys, max_vectors (R), block_rows(D), bytes(D, rows), enter_thread, leave_thread
//   pack_queries, clear, export_rows
//   begin_tile      K is there on return
//   scores<R>       of a panel, into scores_of(row); keep_weights<R> takes what the softmax made of them
//   finish_values   V is there on return, and odd_values is set
//   expect_tile     which tile comes next, if that is known
//   accumulate<R>   the weighted values of a panel
#pragma once
#include <omp.h>
#include <stdlib.h>

#include <type_traits>

#include "mask.h"
#include "softmax.h"

namespace warmattn::WA_ISA {

constexpr int64_t kSplitKeys = 4096;
constexpr size_t kMostWaitingBytes = size_t(128) << 20;  // of partials that wait to be merged; past it, threads idle

// Memory that grows and is kept for the thread's next call.
struct Arena {
    char* base;
    size_t capacity, used;

    bool reserve(size_t bytes) {
        used = 0;
        if (bytes <= capacity) return true;
        free(base);
        base = (char*)aligned_alloc(64, (bytes + 63) / 64 * 64);
        capacity = base ? bytes : 0;
        return base;
    }
    template <class T>
    T* take(size_t count) {
        T* taken = (T*)(base + used);
        used += (count * sizeof(T) + 63) / 64 * 64;
        return taken;
    }
};

// 2^(factor * x) for the weights of the merge law: f64 additions and products only, so that any implementation of the
// law (warmattn.partials is one) gets the same bits. Taylor series of 2^r about 0, error below 1e-10.
static float merge_weight(float difference, double factor) {
    double x = double(difference) * factor;
    if (x < -200.) x = -200.;  // rounds to 0 as f32
    const double n = rint(x);
    const double r = (x - n) * 0.6931471805599453;
    double p = 1. / 40320;
    const double coefficients[] = {1. / 5040, 1. / 720, 1. / 120, 1. / 24, 1. / 6, 1. / 2, 1., 1.};
    for (double c : coefficients) p = p * r + c;
    if (!(n == n)) return NAN;
    const uint64_t bits = uint64_t(int64_t(n) + 1023) << 52;
    double power;
    memcpy(&power, &bits, 8);
    return float(p * power);
}

// Non-finite rows of a tile's K and V, one bit per key.
struct OddKeys {
    uint64_t bits[2];

    void clear() { bits[0] = bits[1] = 0; }
    void add(int key) { bits[key / 64] |= uint64_t(1) << (key % 64); }
    bool any() const { return bits[0] | bits[1]; }
    bool has(int key) const { return bits[key / 64] >> (key % 64) & 1; }
};

// The packed rows of one KV head that are worked on together.
struct Block {
    int64_t b, kv_head, group;
    int64_t row0;  // first packed row
    int rows;

    int64_t head(int row) const { return kv_head * group + (row0 + row) % group; }
    int64_t query(int row) const { return (row0 + row) / group; }
};

// A block's partial results over some keys: maximum and sum per row, then the accumulator's rows.
struct Slot {
    float *maximum, *sum, *accumulator;

    static int64_t padded(int64_t rows) { return (rows + 15) / 16 * 16; }
    static int64_t floats(int64_t rows, int64_t D) { return padded(rows) * (D + 2); }
    static Slot at(float* memory, int64_t rows) {
        return {memory, memory + padded(rows), memory + 2 * padded(rows)};
    }
};

// Vectors of rows in the next panel. One more than the widest goes as two even panels, not as a wide and a thin one.
template <int Widest>
WA_INLINE int panel_vectors(int left) {
    return left == Widest + 1 && Widest > 2 ? Widest - 1 : smaller(left, Widest);
}

struct KeyRange {
    int64_t first, end;
    bool empty() const { return first >= end; }
    int64_t first_split() const { return first / kSplitKeys; }
    int64_t end_split() const { return empty() ? first_split() : (end + kSplitKeys - 1) / kSplitKeys; }
};

// Keys that query row `query` of sequence `b` sees by position.
static KeyRange keys_of(const WaCall& call, int64_t b, int64_t query) {
    KeyRange range = {call.kv_start[b], call.kv_len[b]};
    if (call.kind == WA_CAUSAL || call.kind == WA_WINDOW) {
        const int64_t position = call.q_offset[b] + query;
        range.end = smaller(range.end, position + 1);
        if (call.kind == WA_WINDOW) range.first = larger(range.first, position - call.window + 1);
    }
    range.first = smaller(range.first, call.kv_len[b]);  // also where a row sees nothing, no key past the last is named
    range.end = larger(range.end, range.first);
    return range;
}

static KeyRange keys_of(const WaCall& call, const Block& block) {
    const KeyRange low = keys_of(call, block.b, block.query(0)), high = keys_of(call, block.b, block.query(block.rows - 1));
    return {low.first, larger(low.end, high.end)};
}

template <class Engine>
class BlockRunner {
    static constexpr int kKeys = Engine::tile_keys;
    static constexpr int kWidest = Engine::max_vectors * W;
    static constexpr int kWords = kKeys / 32;

    const WaCall& call;
    const Block block;
    const int padded;  // rows, rounded up to whole vectors; padding rows repeat the last row's range
    Engine engine;
    int32_t *first, *end;
    float *maximum, *sum, *rescale, *cells;
    uint32_t* words;  // [row / L][key / 32][L]
    SoftmaxScale scale;

    // What a panel sees of the tile at hand.
    struct Panel {
        int row, vectors;
        int from, to;  // keys, whole groups of 32
        TileView view;
    };
    Panel* panels;

    template <class Visit>
    WA_INLINE_MEMBER static bool at_width(const Panel& panel, Visit visit) {
        if (panel.vectors == 1) return visit(std::integral_constant<int, 1>());
        if (panel.vectors == 2) return visit(std::integral_constant<int, 2>());
        return visit(std::integral_constant<int, Engine::max_vectors>());
    }

  public:
    static int padded_rows(int rows) { return (rows + W - 1) / W * W; }

    static size_t bytes(int64_t D, int rows) {
        const size_t padded = padded_rows(rows);
        const size_t own = ((5 + kWords) * padded + kKeys * kWidest) * sizeof(float) +
                           padded / W * sizeof(Panel) + 1024;
        return own + Engine::bytes(D, padded);
    }

    BlockRunner(const WaCall& call, const Block& block, Arena& arena)
        : call(call), block(block), padded(padded_rows(block.rows)), engine(call, block, padded, arena) {
        first = arena.take<int32_t>(padded);
        end = arena.take<int32_t>(padded);
        maximum = arena.take<float>(padded);
        sum = arena.take<float>(padded);
        rescale = arena.take<float>(padded);
        cells = arena.take<float>(kKeys * kWidest);
        words = arena.take<uint32_t>(kWords * padded);
        panels = arena.take<Panel>(padded / W);
        for (int row = 0; row < padded; row++) {
            const KeyRange range = keys_of(call, block.b, block.query(smaller(row, block.rows - 1)));
            first[row] = int32_t(range.first);
            end[row] = int32_t(range.end);
        }
        scale.factor = call.factor;
        scale.lowest = larger(kLowestExponent / call.factor, -3.4028234664e38f);
        scale.per_cell = call.softcap > 0.f ? 1.f : call.scale;
        scale.cap = call.softcap;
        scale.to_cap = call.softcap > 0.f ? float(double(call.scale) / call.softcap) : 0.f;
        engine.pack_queries();
    }

    // The block over the keys of one split, tile by tile in ascending order.
    void attend(int64_t split, const Slot& slot) {
        for (int row = 0; row < padded; row++) maximum[row] = -INFINITY, sum[row] = 0.f;
        engine.clear();
        KeyRange keys = keys_of(call, block);
        keys.first = larger(keys.first, split * kSplitKeys);
        keys.end = smaller(keys.end, (split + 1) * kSplitKeys);
        for (int64_t key0 = keys.first / kKeys * kKeys; key0 < keys.end; key0 += kKeys) attend_tile(key0, keys);
        for (int row = 0; row < block.rows; row++) {
            // A NaN score makes its row's sum NaN but never its running maximum.
            slot.maximum[row] = sum[row] == sum[row] ? maximum[row] : NAN;
            slot.sum[row] = sum[row];
        }
        engine.export_rows(slot.accumulator);
    }

  private:
    void attend_tile(int64_t key0, const KeyRange& keys) {
        const int tile_first = int(larger(keys.first - key0, int64_t(0)));
        const int tile_end = int(smaller(keys.end - key0, int64_t(kKeys)));
        int count = 0;
        for (int row = 0; row < padded;) {
            Panel& panel = panels[count];
            panel.row = row, panel.vectors = panel_vectors<Engine::max_vectors>((padded - row) / W);
            row += panel.vectors * W;
            if (!at_width(panel, [&](auto R) { return look<R>(panel, key0, tile_first, tile_end); })) continue;
            if (count++ == 0) engine.begin_tile(key0, tile_first, tile_end);
            at_width(panel, [&](auto R) { return weigh<R>(panel); });
        }
        if (count == 0) return;
        engine.finish_values();
        const int64_t next = key0 + kKeys;
        if (next < keys.end && call.kind != WA_EXTERNAL)  // a mask may hide the next tile
            engine.expect_tile(next, 0, int(smaller(keys.end - next, int64_t(kKeys))));
        for (int i = 0; i < count; i++)
            at_width(panels[i], [&](auto R) { return accumulate<R>(panels[i]); });
    }

    // What the panel sees of a tile; false when it sees nothing.
    template <int R>
    bool look(Panel& panel, int64_t key0, int tile_first, int tile_end) {
        constexpr int L = R * W;
        const int row = panel.row, last = row + L - 1;
        // Ranges grow with the row, so the panel's first and last row bound them all.
        int from = int(larger(int64_t(first[row]) - key0, int64_t(tile_first)));
        int to = int(smaller(int64_t(end[last]) - key0, int64_t(tile_end)));
        if (from >= to) return false;
        panel.from = from / 32 * 32, panel.to = (to + 31) / 32 * 32;
        panel.view = {first + row, end + row, int32_t(key0), false, nullptr, nullptr};
        panel.view.whole = first[last] <= key0 + panel.from && end[row] >= key0 + panel.to;
        return call.kind != WA_EXTERNAL || read_mask<L>(key0, row, panel.from, panel.to, panel.view);
    }

    template <int R>
    bool weigh(const Panel& panel) {
        constexpr int L = R * W;
        const int row = panel.row;
        float* scores = engine.scores_of(row);
        engine.template scores<R>(row, panel.from, panel.to, scores);
        for (int lane = 0; lane < L; lane += W)
            softmax_rows<L>(scores, panel.from, panel.to, lane, panel.view, scale, maximum + row, sum + row,
                            rescale + row);
        engine.template keep_weights<R>(row, panel.from, panel.to, scores);
        return true;
    }

    template <int R>
    bool accumulate(const Panel& panel) {
        constexpr int L = R * W;
        const int row = panel.row;
        if (engine.odd_values.any())
            for (int key = panel.from; key < panel.to; key++)
                if (engine.odd_values.has(key))  // its row of V was loaded as zeros
                    for (int lane = 0; lane < L; lane++)
                        if (sees<L>(panel.view, key, lane)) sum[row + lane] = NAN;
        engine.template accumulate<R>(row, panel.from, panel.to, rescale + row);
        return true;
    }

    // Fill the panel's words (and cells, where any is finite), narrow [from, to) to the 32-key groups with a visible
    // key; false when there is none.
    template <int L>
    bool read_mask(int64_t key0, int row, int& from, int& to, TileView& view) {
        const Mask mask = {call, block.b, block.kv_head, block.group};
        const bool heads_share = call.mask.head == 0;
        uint32_t* row_words = words + row * kWords;
        int seen_from = to, seen_to = from;
        bool whole = true, adds = false;
        for (int key = from; key < to; key += 32) {
            uint32_t any = 0;
            for (int lane = 0; lane < L; lane++) {
                const int at = smaller(row + lane, block.rows - 1);
                uint32_t& word = row_words[key / 32 * L + lane];
                if (lane > 0 && (row + lane >= block.rows || (heads_share && block.query(at) == block.query(at - 1)))) {
                    word = (&word)[-1];
                } else {
                    const int begin = int(larger(int64_t(first[at]) - key0 - key, int64_t(0)));
                    const int stop = int(smaller(int64_t(end[at]) - key0 - key, int64_t(32)));
                    const CellBits bits =
                        begin < stop ? mask.bits(block.row0 + at, key0 + key, stop) : CellBits{0, 0};
                    word = bits.seen & ~low_bits(smaller(begin, 31));
                    adds |= (bits.adds & word) != 0;
                }
                any |= word;
                whole &= word == ~0u;
            }
            if (any) seen_from = smaller(seen_from, key), seen_to = key + 32;
        }
        from = seen_from, to = seen_to;
        if (from >= to) return false;
        view.whole = whole && !adds;
        view.words = view.whole ? nullptr : row_words;
        if (adds) {
            view.cells = cells;
            for (int key = from; key < to; key++)
                for (int lane = 0; lane < L; lane++) {
                    const int at = smaller(row + lane, block.rows - 1);
                    const bool seen = row_words[key / 32 * L + lane] >> (key % 32) & 1;
                    cells[key * L + lane] = seen ? mask.addend(block.row0 + at, key0 + key) : 0.f;
                }
        }
        return true;
    }
};

// The merge law: fold the partial of later keys into that of earlier ones.
static void merge(const WaCall& call, int rows, const Slot& into, const Slot& later) {
    for (int row = 0; row < rows; row++) {
        float& top = into.maximum[row];
        const float next = later.maximum[row];
        const float joint = next > top || next != next ? next : top;  // NaN stays
        const float base = joint == -INFINITY ? 0.f : joint;
        const float w1 = merge_weight(top - base, call.merge_factor);
        const float w2 = merge_weight(next - base, call.merge_factor);
        float* a = into.accumulator + row * call.D;
        const float* b = later.accumulator + row * call.D;
        for (int64_t d = 0; d < call.D; d += W) store(a + d, load(a + d) * set1(w1) + load(b + d) * set1(w2));
        into.sum[row] = into.sum[row] * w1 + later.sum[row] * w2;
        top = joint;
    }
}

// Write a block's rows of the result from its merged partial.
static void finish(const WaCall& call, const Block& block, const Slot& slot) {
    for (int row = 0; row < block.rows; row++) {
        const int64_t head = block.head(row), query = block.query(row);
        float* out = call.out + block.b * call.out_batch + head * call.out_head + query * call.out_row;
        const float* acc = slot.accumulator + row * call.D;
        const float total = slot.sum[row];
        const vf divisor = set1(total == 0.f ? 1.f : total);  // a row that saw nothing has an accumulator of zeros
        for (int64_t d = 0; d < call.D; d += W) storeu(out + d, load(acc + d) / divisor);
        if (call.maximum) {
            const int64_t at = (block.b * call.H + head) * call.S + query;
            call.maximum[at] = slot.maximum[row];
            call.sum[at] = total;
        }
    }
}

static void clear(const WaCall& call, int rows, const Slot& slot) {
    for (int row = 0; row < rows; row++) slot.maximum[row] = -INFINITY, slot.sum[row] = 0.f;
    memset(slot.accumulator, 0, size_t(rows) * call.D * sizeof(float));
}

// run_partials: copy a block's partial of one split to where the caller wants it.
static void write_partial(const WaCall& call, const Block& block, int64_t split, const Slot& slot) {
    for (int row = 0; row < block.rows; row++) {
        const int64_t plane = ((split - call.first_split) * call.B + block.b) * call.H + block.head(row);
        const int64_t at = plane * call.S + block.query(row);
        call.maximum[at] = slot.maximum[row];
        call.sum[at] = slot.sum[row];
        memcpy(call.accumulator + at * call.D, slot.accumulator + row * call.D, call.D * sizeof(float));
    }
}

// How a call is cut into blocks, the longest first.
struct Plan {
    const WaCall& call;
    int64_t group, queries_per_block, blocks_per_head, blocks;
    int most_splits;

    Plan(const WaCall& call, int block_rows) : call(call), group(call.H / call.Hk) {
        queries_per_block = larger(int64_t(1), block_rows / group);
        blocks_per_head = (call.S + queries_per_block - 1) / queries_per_block;
        blocks = call.B * call.Hk * blocks_per_head;
        most_splits = 0;
        for (int64_t b = 0; b < call.B; b++) {
            const KeyRange low = keys_of(call, b, 0), high = keys_of(call, b, call.S - 1);
            const KeyRange keys = {low.first, larger(low.end, high.end)};
            most_splits = larger(most_splits, int(keys.end_split() - keys.first_split()));
        }
    }

    int largest_block() const { return int(smaller(queries_per_block, call.S) * group); }

    Block block(int64_t index) const {
        const int64_t head = index % (call.B * call.Hk);
        const int64_t query = (blocks_per_head - 1 - index / (call.B * call.Hk)) * queries_per_block;
        const int64_t queries = smaller(queries_per_block, call.S - query);
        return {head / call.Hk, head % call.Hk, group, query * group, int(queries * group)};
    }
};

// Which of three ways the work is shared out. Bits do not depend on it.
enum Sharing {
    kBlocks,         // an item is a block: it walks its splits and folds each partial in
    kBlocksBySplit,  // few blocks: an item is a block's split, its partial waits in a slot until all are there
    kExport,         // run_partials: as before, but the partials are the result
};

// One thread's part: items come from the team's loop.
template <class Engine>
struct Worker {
    const WaCall& call;
    const Plan& plan;
    Arena &arena, &slots;
    float* shared_slots;
    int64_t slot_floats;

    void whole_block(int64_t index) {
        const Block block = plan.block(index);
        const KeyRange keys = keys_of(call, block);
        const Slot total = Slot::at((float*)slots.base, block.rows);
        const Slot part = Slot::at((float*)slots.base + slot_floats, block.rows);
        if (keys.empty()) {
            clear(call, block.rows, total);
        } else {
            BlockRunner<Engine> runner(call, block, arena);
            runner.attend(keys.first_split(), total);
            for (int64_t split = keys.first_split() + 1; split < keys.end_split(); split++) {
                runner.attend(split, part);
                merge(call, block.rows, total, part);
            }
        }
        finish(call, block, total);
    }

    void one_split(int64_t item, Sharing sharing) {
        const Block block = plan.block(item / plan.most_splits);
        const KeyRange keys = keys_of(call, block);
        const int64_t split = keys.first_split() + item % plan.most_splits;
        if (split >= keys.end_split()) return;
        float* memory = sharing == kExport ? (float*)slots.base : shared_slots + item * slot_floats;
        const Slot slot = Slot::at(memory, block.rows);
        BlockRunner<Engine>(call, block, arena).attend(split, slot);
        if (sharing == kExport) write_partial(call, block, split, slot);
    }

    void merge_splits(int64_t index) {
        const Block block = plan.block(index);
        const KeyRange keys = keys_of(call, block);
        float* memory = shared_slots + index * plan.most_splits * slot_floats;
        const Slot total = Slot::at(memory, block.rows);
        if (keys.empty()) clear(call, block.rows, total);
        for (int64_t i = 1; i < keys.end_split() - keys.first_split(); i++)
            merge(call, block.rows, total, Slot::at(memory + i * slot_floats, block.rows));
        finish(call, block, total);
    }
};

template <class Engine>
int attend(const WaCall& call) {
    const Plan plan(call, Engine::block_rows(call.D));
    const int rows = plan.largest_block();
    const int64_t slot_floats = Slot::floats(rows, call.D);
    const size_t waiting = size_t(plan.blocks * plan.most_splits * slot_floats) * sizeof(float);
    const bool few = plan.most_splits > 1 && plan.blocks < 4 * call.threads && waiting <= kMostWaitingBytes;
    const Sharing sharing = call.accumulator ? kExport : few ? kBlocksBySplit : kBlocks;
    const int64_t items = sharing == kBlocks ? plan.blocks : plan.blocks * plan.most_splits;

    static thread_local Arena shared;
    if (sharing == kBlocksBySplit && !shared.reserve(items * slot_floats * sizeof(float))) return -1;
    float* const shared_slots = (float*)shared.base;
    int failed = 0;

#pragma omp parallel num_threads(call.threads)
    {
        static thread_local Arena arena, slots;
        Engine::enter_thread();
        if (!arena.reserve(BlockRunner<Engine>::bytes(call.D, rows)) || !slots.reserve(2 * slot_floats * sizeof(float)))
            __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        Worker<Engine> worker = {call, plan, arena, slots, shared_slots, slot_floats};
#pragma omp barrier
        if (!__atomic_load_n(&failed, __ATOMIC_RELAXED)) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t item = 0; item < items; item++) {
                arena.used = 0;
                if (sharing == kBlocks)
                    worker.whole_block(item);
                else
                    worker.one_split(item, sharing);
            }
            if (sharing == kBlocksBySplit) {
#pragma omp for schedule(dynamic, 1)
                for (int64_t index = 0; index < plan.blocks; index++) worker.merge_splits(index);
            }
        }
        Engine::leave_thread();
    }
    return failed ? -1 : 0;
}

template <template <int, int> class Engine, int QkDtype>
int attend_form(const WaCall& call) {
    switch (call.v_form) {
        case WA_F32: return attend<Engine<QkDtype, WA_F32>>(call);
        case WA_F16: return attend<Engine<QkDtype, WA_F16>>(call);
        case WA_BF16: return attend<Engine<QkDtype, WA_BF16>>(call);
        default: return attend<Engine<QkDtype, WA_CODES>>(call);
    }
}

template <template <int, int> class Engine>
int attend_call(const WaCall& call) {
    return call.qk_dtype == WA_F16 ? attend_form<Engine, WA_F16>(call) : attend_form<Engine, WA_BF16>(call);
}

}  // namespace warmattn::WA_ISA
