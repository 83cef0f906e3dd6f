// Which instruction sets this library was built for, which of them this machine can run, and the way into each.
#include "call.h"
#include <stddef.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define WA_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
int warmattn_attend_amx(const WaCall*);
int warmattn_attend_avx512(const WaCall*);
int warmattn_attend_avx2(const WaCall*);
int warmattn_attend_neon(const WaCall*);
int warmattn_attend_portable(const WaCall*);
void warmattn_rows_avx512(const WaRows*);
void warmattn_rows_avx2(const WaRows*);
void warmattn_rows_neon(const WaRows*);
void warmattn_rows_portable(const WaRows*);
}

namespace {

const char* nothing_missing() { return nullptr; }

#if defined(__x86_64__)

// Each returns what the machine lacks, or null.
const char* avx2_missing() {
    const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return has ? nullptr : "the CPU lacks AVX2, FMA or F16C";
}

const char* avx512_missing() {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return has ? avx2_missing() : "the CPU lacks AVX-512 F, BW, VL or DQ";
}

#if defined(WA_BUILD_AMX)

const char* amx_missing() {
    if (avx512_missing()) return avx512_missing();
    if (!__builtin_cpu_supports("avx512vbmi")) return "the CPU lacks AVX-512 VBMI";
    unsigned a, b, c, d;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    const bool has = (d >> 24 & 1) && (d >> 22 & 1);  // AMX-TILE and AMX-BF16
    if (!has) return "the CPU lacks AMX-BF16";
#if defined(__linux__)
    const long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? nullptr : "the kernel refuses AMX to this process";
#else
    return "AMX needs Linux";
#endif
}

#endif
#endif

struct Isa {
    const char* name;
    const char* (*missing)();
    int (*attend)(const WaCall*);
    void (*work_on_rows)(const WaRows*);
};

// Fastest first; portable C++ runs anywhere.
const Isa kIsas[] = {
#if defined(WA_BUILD_AMX)
    {"amx", amx_missing, warmattn_attend_amx, warmattn_rows_avx512},
#endif
#if defined(__x86_64__)
    {"avx512", avx512_missing, warmattn_attend_avx512, warmattn_rows_avx512},
    {"avx2", avx2_missing, warmattn_attend_avx2, warmattn_rows_avx2},
#elif defined(__aarch64__)
    {"neon", nothing_missing, warmattn_attend_neon, warmattn_rows_neon},
#endif
    {"portable", nothing_missing, warmattn_attend_portable, warmattn_rows_portable},
};

}  // namespace

WA_EXPORT int64_t warmattn_call_bytes() { return sizeof(WaCall); }

WA_EXPORT int warmattn_isa_count() { return sizeof(kIsas) / sizeof(kIsas[0]); }

WA_EXPORT const char* warmattn_isa_name(int isa) { return kIsas[isa].name; }

// Why this machine cannot run it, or null.
WA_EXPORT const char* warmattn_isa_missing(int isa) { return kIsas[isa].missing(); }

// 0, or -1 when memory for the workspace could not be had.
WA_EXPORT int warmattn_attend(int isa, const WaCall* call) { return kIsas[isa].attend(call); }

WA_EXPORT int64_t warmattn_rows_bytes() { return sizeof(WaRows); }

// A large result is fresh memory, and a page fault for every 4 KiB of it costs more than its values do.
static void ask_for_huge_pages(const WaRows& call) {
#if defined(__linux__)
    const uintptr_t huge = uintptr_t(2) << 20;
    uintptr_t bytes = call.D * (call.task == WA_ENCODE ? 1 : sizeof(float));
    for (int64_t axis = 0; axis < call.rank; axis++) bytes *= call.sizes[axis];
    const uintptr_t start = (uintptr_t)call.to;
    const uintptr_t from = (start + huge - 1) / huge * huge, to = (start + bytes) / huge * huge;
    if (from < to) madvise((void*)from, to - from, MADV_HUGEPAGE);  // a hint: refused, it changes nothing
#else
    (void)call;
#endif
}

WA_EXPORT void warmattn_rows(int isa, const WaRows* call) {
    ask_for_huge_pages(*call);
    kIsas[isa].work_on_rows(call);
}
