#include "variants.h"

#include <atomic>
#include <cstdint>
#include <cstring>

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ggml-backend.h"

namespace attested {
namespace {

constexpr const char * kNames[kVariants] = {"plain", "avx2", "avx-vnni", "avx512-vnni", "amx-int8"};

struct Registers {
    uint32_t a, b, c, d;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers found = {0, 0, 0, 0};
    __get_cpuid_count(leaf, subleaf, &found.a, &found.b, &found.c, &found.d);
    return found;
}

bool has(uint32_t word, int bit) { return (word >> bit) & 1; }

// What the operating system saves of the registers: XCR0.
uint64_t saved_registers() {
    if (!has(cpuid(1, 0).c, 27)) { // OSXSAVE
        return 0;
    }
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t) high << 32 | low;
}

bool saved(uint64_t mask) { return (saved_registers() & mask) == mask; }

// Linux hands the tile registers out on request: ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA. Threads started later have it too.
bool tiles_granted() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

bool offered(Variant variant) {
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0), more = cpuid(7, 1);
    const bool avx2 = saved(0x6) && has(one.c, 12) && has(one.c, 28) && has(one.c, 29) && has(seven.b, 5) && has(seven.b, 3) && has(seven.b, 8);
    const bool avx512 = avx2 && saved(0xe6) && has(seven.b, 16) && has(seven.b, 17) && has(seven.b, 30) && has(seven.b, 31) && has(seven.c, 11);
    switch (variant) {
        case Variant::plain: return true;
        case Variant::avx2: return avx2;
        case Variant::avxvnni: return avx2 && has(more.a, 4);
        case Variant::avx512: return avx512;
        case Variant::amx: return avx512 && saved(0x60000) && has(seven.d, 24) && has(seven.d, 25) && tiles_granted();
    }
    return false;
}

struct Offered {
    bool variants[kVariants];
    Variant best = Variant::plain;
    Offered() {
        for (int v = 0; v < kVariants; ++v) {
            variants[v] = offered((Variant) v);
            if (variants[v]) {
                best = (Variant) v;
            }
        }
    }
};

const Offered & processor() {
    static const Offered found;
    return found;
}

std::atomic<int> chosen{-1};

} // namespace

const char * name(Variant variant) { return kNames[(int) variant]; }

bool available(Variant variant) { return processor().variants[(int) variant]; }

bool named(const char * name, Variant & found) {
    for (int v = 0; v < kVariants; ++v) {
        if (strcmp(name, kNames[v]) == 0 && available((Variant) v)) {
            found = (Variant) v;
            return true;
        }
    }
    return false;
}

Variant variant() {
    const int forced = chosen.load(std::memory_order_relaxed);
    return forced < 0 ? processor().best : (Variant) forced;
}

} // namespace attested

extern "C" {

// The arithmetic that every variant computes. A change of any bit of any result is another name.
GGML_BACKEND_API const char * attested_arithmetic(void);
const char * attested_arithmetic(void) { return "attested-1"; }

// Name of the variant in use.
GGML_BACKEND_API const char * attested_variant(void);
const char * attested_variant(void) { return attested::name(attested::variant()); }

// Whether this processor has the variant of that name.
GGML_BACKEND_API bool attested_variant_available(const char * name);
bool attested_variant_available(const char * name) {
    attested::Variant found;
    return attested::named(name, found);
}

// Compute with the variant of that name from the next evaluation on. False, and nothing changes, where there is none here.
GGML_BACKEND_API bool attested_use_variant(const char * name);
bool attested_use_variant(const char * name) {
    attested::Variant found;
    if (!attested::named(name, found)) {
        return false;
    }
    attested::chosen.store((int) found, std::memory_order_relaxed);
    return true;
}

} // extern "C"
