// Panels of 4- and 8-bit codes: unpacked to bfloat16 in the first-level cache, block by block, then multiplied.
//
// A block holds ``group`` inputs of 32 columns: 32 steps, at 4 bits 32 centres (bfloat16), then the codes of each pair
// of inputs: at 4 bits 32 bytes, byte c % 16 * 2 + input, low nibble for column c < 16, high nibble for c >= 16; at 8
// bits 64 bytes as [32][2]. A code (less 8 at 4 bits) is exact in bfloat16, so the sum over a group is that of the
// codes, and value = code * step + centre is never rounded:
//   sum of x * value = step * (sum of x * code) + centre * (sum of x).
#pragma once
#include "layer.h"

constexpr int CHUNK_STEPS = 64;  // pairs of inputs unpacked at once: 8 KiB

static inline int64_t block_bytes(int bits, int group) {
    return (bits == 4 ? 2 : 1) * COLUMNS * 2 + int64_t(group) * COLUMNS * bits / 8;
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

static inline void unpack(int bits, const uint8_t* codes, int steps, bf16* out) {
    if (bits == 4) {
        bf16 values[32];
        for (int i = 0; i < 32; ++i) values[i] = narrow(float(i % 16 - 8));
        const __m512i table = _mm512_loadu_si512(values);
        for (int i = 0; i < steps; ++i, codes += 32, out += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(codes) + 2560, _MM_HINT_T0);
            const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
            _mm512_storeu_si512(out, _mm512_permutexvar_epi16(both, table));  // five bits choose, the fifth does not matter
            _mm512_storeu_si512(out + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table));
        }
        return;
    }
    for (int i = 0; i < 2 * steps; ++i, codes += 32, out += 32) {
        _mm_prefetch(reinterpret_cast<const char*>(codes) + 2560, _MM_HINT_T0);
        const __m128i *at = reinterpret_cast<const __m128i*>(codes);
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
        _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

#else

static inline void unpack(int bits, const uint8_t* codes, int steps, bf16* out) {
    for (int i = 0; i < steps; ++i, out += 64) {
        if (bits == 4) {
            for (int c = 0; c < 32; ++c) {
                out[c] = narrow(float(int(codes[32 * i + c] & 15) - 8));
                out[32 + c] = narrow(float(int(codes[32 * i + c] >> 4) - 8));
            }
        } else {
            for (int c = 0; c < 64; ++c) out[c] = narrow(float(int8_t(codes[64 * i + c])));
        }
    }
}

#endif

// As ``panel``, for coded weights: out [rows][32].
static void panel_of_codes(const Linear& linear, int64_t index, const bf16* x, int64_t stride, int rows, float* out) {
    const int bits = linear.bits, group = linear.group, groups = linear.k / group;
    const uint8_t* block = reinterpret_cast<const uint8_t*>(linear.panels) + index * groups * block_bytes(bits, group);
    alignas(64) bf16 weights[CHUNK_STEPS * COLUMNS * 2];
    alignas(64) float sums[TILE_ROWS * COLUMNS], part[TILE_ROWS * COLUMNS];
    std::memset(out, 0, sizeof(float) * rows * COLUMNS);
    for (int g = 0; g < groups; ++g, block += block_bytes(bits, group)) {
        const bf16 *step = reinterpret_cast<const bf16*>(block), *centre = step + COLUMNS;
        const uint8_t* codes = block + (bits == 4 ? 4 : 2) * COLUMNS;
        const bf16* inputs = x + int64_t(g) * group;
        for (int i = 0; i < group / 2; i += CHUNK_STEPS) {
            const int steps = group / 2 - i < CHUNK_STEPS ? group / 2 - i : CHUNK_STEPS;
            unpack(bits, codes + int64_t(i) * bits * 8, steps, weights);
            panel(inputs + 2 * i, stride, rows, weights, steps, i ? part : sums);
            if (i)
                for (int j = 0; j < rows * COLUMNS; ++j) sums[j] += part[j];
        }
        float scale[COLUMNS], middle[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) scale[c] = wide(step[c]);
        for (int c = 0; c < COLUMNS; ++c) middle[c] = bits == 4 ? wide(centre[c]) : 0.0f;
        for (int r = 0; r < rows; ++r) {
            float total = 0.0f;
            if (bits == 4) {
                const bf16* row = inputs + r * stride;
#pragma omp simd reduction(+ : total)
                for (int i = 0; i < group; ++i) total += wide(row[i]);
            }
#pragma omp simd
            for (int c = 0; c < COLUMNS; ++c)
                out[r * COLUMNS + c] += scale[c] * sums[r * COLUMNS + c] + middle[c] * total;
        }
    }
}
