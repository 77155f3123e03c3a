// What this machine's cores can do at most: bytes read from memory a second, and integer operations a second by the unit
// that each variant of the kernels multiplies with (a multiply-add counts as two). Prints JSON. Arguments: the number of
// threads, all of them busy at once, and how many MiB are read, again and again: as many as a model's weights have, since a
// part of them may stay in a cache. Each figure is the best of many passes, short enough to lie within one turn of the
// scheduler.
#define _GNU_SOURCE
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PASSES = 60, SUMS = 12 };
static volatile int64_t sink;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double) at.tv_sec + 1e-9 * (double) at.tv_nsec;
}

__attribute__((target("avx2"))) static int64_t read_all(const __m256i * from, size_t count) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t i = 0; i < count; i += 4) {
        a = _mm256_xor_si256(a, from[i]);
        b = _mm256_xor_si256(b, from[i + 1]);
        c = _mm256_xor_si256(c, from[i + 2]);
        d = _mm256_xor_si256(d, from[i + 3]);
    }
    return _mm256_extract_epi64(_mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)), 0);
}

// Independent sums, so that what counts is how often the unit can start. The asm keeps them in registers and apart.
#define LOOP(type, zero, step)                                  \
    type sums[SUMS];                                            \
    for (int i = 0; i < SUMS; ++i) sums[i] = zero;              \
    for (int64_t n = 0; n < rounds; ++n) {                      \
        _Pragma("clang loop unroll(full)")                      \
        for (int i = 0; i < SUMS; ++i) {                        \
            step;                                               \
            __asm__ volatile("" : "+v"(sums[i]));               \
        }                                                       \
    }                                                           \
    for (int i = 1; i < SUMS; ++i) sums[0] = sums[0] + sums[i]; \
    return *(int64_t *) &sums[0];

__attribute__((target("avx2"))) static int64_t avx2(int64_t rounds) {
    __m256i x = _mm256_set1_epi8(3), y = _mm256_set1_epi8(5), one = _mm256_set1_epi16(1);
    LOOP(__m256i, _mm256_setzero_si256(),
         __asm__ volatile("" : "+v"(x));
         sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), one)))
}

__attribute__((target("avx2,avxvnni"))) static int64_t avxvnni(int64_t rounds) {
    const __m256i x = _mm256_set1_epi8(3), y = _mm256_set1_epi8(5);
    LOOP(__m256i, _mm256_setzero_si256(), sums[i] = _mm256_dpbusd_avx_epi32(sums[i], x, y))
}

__attribute__((target("avx512f,avx512vnni"))) static int64_t avx512(int64_t rounds) {
    const __m512i x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(5);
    LOOP(__m512i, _mm512_setzero_si512(), sums[i] = _mm512_dpbusd_epi32(sums[i], x, y))
}

__attribute__((target("amx-tile,amx-int8"))) static int64_t amx(int64_t rounds) {
    struct __attribute__((aligned(64))) {
        uint8_t palette, start, reserved[14];
        uint16_t columns[16];
        uint8_t rows[16];
    } shape;
    memset(&shape, 0, sizeof shape);
    shape.palette = 1;
    for (int i = 0; i < 8; ++i) {
        shape.columns[i] = 64;
        shape.rows[i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(shape));
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
    for (int64_t n = 0; n < rounds; ++n) {
        _tile_dpbssd(0, 4, 6); _tile_dpbssd(1, 4, 7); _tile_dpbssd(2, 5, 6); _tile_dpbssd(3, 5, 7);
    }
    _tile_release();
    return rounds;
}

// Of all threads together: the slowest one's time counts, as it does in a product.
static double best_rate(int64_t (*run)(int64_t), double each, int64_t rounds, int threads) {
    double best = 0;
    for (int pass = 0; pass < PASSES; ++pass) {
        const double start = now();
#pragma omp parallel num_threads(threads)
        sink = run(rounds);
        const double rate = each * (double) rounds * threads / (now() - start);
        best = rate > best ? rate : best;
    }
    return best;
}

static double best_read(int threads, size_t bytes) {
    char * area = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (area == MAP_FAILED) exit(1);
    memset(area, 1, bytes);
    double best = 0;
    for (int pass = 0; pass < PASSES; ++pass) {
        const double start = now();
#pragma omp parallel num_threads(threads)
        {
            const size_t part = bytes / (size_t) omp_get_num_threads() / 128 * 128;
            sink = read_all((const __m256i *) (area + part * (size_t) omp_get_thread_num()), part / 32);
        }
        const double rate = (double) bytes / (now() - start);
        best = rate > best ? rate : best;
    }
    munmap(area, bytes);
    return best;
}

int main(int count, char ** words) {
    const int threads = count > 1 ? atoi(words[1]) : 1;
    const size_t bytes = (size_t) (count > 2 ? atoi(words[2]) : 256) << 20;
    printf("{\"read\": %.4g, \"avx2\": %.4g", best_read(threads, bytes), best_rate(avx2, SUMS * 64.0, 400000, threads));
    unsigned a, b, c, d;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "0"(7), "2"(1));
    if (a >> 4 & 1) printf(", \"avx-vnni\": %.4g", best_rate(avxvnni, SUMS * 64.0, 400000, threads));
    if (__builtin_cpu_supports("avx512vnni")) {
        printf(", \"avx512-vnni\": %.4g", best_rate(avx512, SUMS * 128.0, 400000, threads));
    }
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "0"(7), "2"(0));
    // Linux hands the tile registers out on request.
    if ((d >> 25 & 1) && syscall(SYS_arch_prctl, 0x1023, 18) == 0) {
        printf(", \"amx-int8\": %.4g", best_rate(amx, 4 * 2 * 16 * 16 * 64.0, 100000, threads));
    }
    puts("}");
    return 0;
}
