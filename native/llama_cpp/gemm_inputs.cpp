// Activations in eight bits, laid out as gemm.h says.
#include "gemm.h"

#include <immintrin.h>
#include <string.h>

namespace attested {
namespace {

__m256 magnitude(__m256 value) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), value); }

// The largest magnitude; a NaN may be lost here, as its scale is of no use anyway.
float largest(const float * x, int count) {
    __m256 most = magnitude(_mm256_loadu_ps(x));
    for (int k = 8; k < count; k += 8) {
        most = _mm256_max_ps(most, magnitude(_mm256_loadu_ps(x + k)));
    }
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// 32 values times `factor`, to the nearest integer, ties to even. None is -128, which has no counterpart: NaN would be.
__m256i codes_of(const float * x, __m256 factor) {
    __m256i part[4];
    for (int j = 0; j < 4; ++j) {
        part[j] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * j), factor));
    }
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(part[0], part[1]), _mm256_packs_epi32(part[2], part[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_max_epi8(_mm256_permutevar8x32_epi32(bytes, order), _mm256_set1_epi8(-127));
}

// Sums of each 16 codes, the first in the lower half.
void sums_of(__m256i codes, int * low, int * high) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
    const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    const __m256i eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
    const __m256i all = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0xb1));
    *low = _mm256_extract_epi32(all, 0);
    *high = _mm256_extract_epi32(all, 4);
}

struct Group {
    uint8_t * at;
    int slots;
    int slot;
};

void block_of_32(const Traits & format, const float * x, const Group & group) {
    const float most = largest(x, kUnit);
    const float scale = most / 127.0f;
    const __m256i codes = codes_of(x, _mm256_set1_ps(most != 0.0f ? 127.0f / most : 0.0f));
    int low, high;
    sums_of(codes, &low, &high);
    _mm256_storeu_si256((__m256i *) (group.at + group.slot * kUnit), codes);
    uint8_t * scales = group.at + (size_t) group.slots * kUnit;
    memcpy(scales + group.slot * 4, &scale, sizeof(scale));
    uint8_t * sums = scales + group.slots * 4 + group.slot * 4;
    if (format.minimum) {
        const float sum = scale * (float) (low + high);
        memcpy(sums, &sum, sizeof(sum));
    } else {
        const int32_t start = -format.offset * (low + high);
        memcpy(sums, &start, sizeof(start));
    }
}

void block_of_256(const Traits & format, const float * x, const Group & group) {
    const float most = largest(x, kSuper);
    const float scale = most / 127.0f;
    const __m256 factor = _mm256_set1_ps(most != 0.0f ? 127.0f / most : 0.0f);
    int16_t sums[16] = {};
    for (int unit = 0; unit < kSuper / kUnit; ++unit) {
        const __m256i codes = codes_of(x + unit * kUnit, factor);
        int low, high;
        sums_of(codes, &low, &high);
        if (format.sub == 16) {
            sums[2 * unit] = (int16_t) low;
            sums[2 * unit + 1] = (int16_t) high;
        } else {
            sums[unit] = (int16_t) (low + high);
        }
        _mm256_storeu_si256((__m256i *) (group.at + ((size_t) unit * group.slots + group.slot) * kUnit), codes);
    }
    uint8_t * scales = group.at + (size_t) group.slots * kSuper;
    memcpy(scales + group.slot * 4, &scale, sizeof(scale));
    memcpy(scales + group.slots * 4 + (size_t) group.slot * sizeof(sums), sums, sizeof(sums));
}

} // namespace

void quantise(const Traits & format, const float * row, int64_t begin, int64_t end, uint8_t * group, int slots, int slot) {
    const size_t bytes = input_block_bytes(format.block, slots);
    for (int64_t block = begin; block < end; ++block) {
        const Group to = {group + block * bytes, slots, slot};
        if (format.block == kUnit) {
            block_of_32(format, row + block * kUnit, to);
        } else {
            block_of_256(format, row + block * kSuper, to);
        }
    }
}

} // namespace attested
