// Runs a build of the CPU kernels in the process of an emulator: `emulated_library.py` sends it calls through a pipe.
//
//     emulated_server LIBRARY
//
// First it says what the library offers, in lines of text. Then, for every call read from standard input, four
// int64 (function, instruction set, bytes of the call, number of regions), the call, and for every region of memory
// that the call points to three int64 (offset of the pointer in the call, bytes, whether it is written) and its bytes.
// The answer is the call's result and the bytes of every region that is written.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "call.h"

namespace {

void read_all(void* to, size_t bytes) {
    if (bytes && fread(to, bytes, 1, stdin) != 1) exit(feof(stdin) ? 0 : 1);
}

void write_all(const void* from, size_t bytes) {
    if (bytes && fwrite(from, bytes, 1, stdout) != 1) exit(1);
}

// Memory that ends where a page without access begins: a read past an operand ends the process.
struct Region {
    int64_t offset, bytes, written;
    char *mapped, *data;
    size_t pages;

    void allocate() {
        const size_t page = size_t(sysconf(_SC_PAGESIZE));
        pages = (size_t(bytes) + page - 1) / page * page;
        mapped = (char*)mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED || mprotect(mapped + pages, page, PROT_NONE) != 0) exit(1);
        data = mapped + pages - bytes;
    }
    void release() { munmap(mapped, pages + size_t(sysconf(_SC_PAGESIZE))); }
};

template <class Function>
Function* find(void* library, const char* name) {
    void* symbol = dlsym(library, name);
    if (!symbol) fprintf(stderr, "%s\n", dlerror()), exit(1);
    return (Function*)symbol;
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 2) return fprintf(stderr, "usage: emulated_server LIBRARY\n"), 2;
    void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    const auto attend = find<int(int, const WaCall*)>(library, "warmattn_attend");
    const auto work_on_rows = find<void(int, const WaRows*)>(library, "warmattn_rows");
    const auto name = find<const char*(int)>(library, "warmattn_isa_name");
    const auto missing = find<const char*(int)>(library, "warmattn_isa_missing");

    const int isas = find<int()>(library, "warmattn_isa_count")();
    printf("%d %d %d\n", int(find<int64_t()>(library, "warmattn_call_bytes")()),
           int(find<int64_t()>(library, "warmattn_rows_bytes")()), isas);
    for (int isa = 0; isa < isas; isa++) printf("%s\n%s\n", name(isa), missing(isa) ? missing(isa) : "");
    fflush(stdout);

    for (;;) {
        struct {
            int64_t is_rows, isa, bytes, regions;
        } header;
        read_all(&header, sizeof header);
        std::vector<char> call(size_t(header.bytes));
        read_all(call.data(), call.size());
        std::vector<Region> regions(size_t(header.regions));
        for (Region& region : regions) {
            read_all(&region, 3 * sizeof(int64_t));
            region.allocate();
            read_all(region.data, size_t(region.bytes));
            memcpy(&call[size_t(region.offset)], &region.data, sizeof region.data);
        }
        int64_t result = 0;
        if (header.is_rows)
            work_on_rows(int(header.isa), (const WaRows*)call.data());
        else
            result = attend(int(header.isa), (const WaCall*)call.data());
        write_all(&result, sizeof result);
        for (Region& region : regions) {
            if (region.written) write_all(region.data, size_t(region.bytes));
            region.release();
        }
        fflush(stdout);
    }
}
