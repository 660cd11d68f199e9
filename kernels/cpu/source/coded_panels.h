// Panels of 4- and 8-bit codes: unpacked to bfloat16 in the first-level cache, block by block, then multiplied.
//
// A block holds ``group`` inputs of 32 columns: 32 steps, at 4 bits 32 centres (bfloat16), then the codes of each pair
// of inputs: at 4 bits 32 bytes, byte c % 16 * 2 + input, low nibble for column c < 16, high nibble for c >= 16; at 8
// bits 64 bytes as [32][2]. A code (less 8 at 4 bits) is exact in bfloat16, so the sum over a group is that of the
// codes, and value = code * step + centre is never rounded:
//   sum of x * value = step * (sum of x * code) + centre * (sum of x).
#pragma once
#include <algorithm>
#include <vector>

#include "layer.h"

constexpr int CHUNK_STEPS = 64;  // pairs of inputs unpacked at once: 8 KiB

static inline int64_t block_bytes(int bits, int group) {
    return (bits == 4 ? 2 : 1) * COLUMNS * 2 + int64_t(group) * COLUMNS * bits / 8;
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

// What a nibble stands for, twice.
static const struct Nibbles {
    bf16 values[32];
    Nibbles() {
        for (int i = 0; i < 32; ++i) values[i] = narrow(float(i % 16 - 8));
    }
} NIBBLES;

static inline void unpack(int bits, const uint8_t* codes, int steps, bf16* out) {
    if (bits == 4) {
        const __m512i table = _mm512_loadu_si512(NIBBLES.values);
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

// A part of a group, or a whole one, whose weights lie unpacked: its sum counts ``step`` times, that of its inputs
// ``centre`` times.
struct Piece {
    int steps;
    const bf16 *step, *centre;
};

// Adds the pieces to out [rows][32], rows 1 to TILE_ROWS.
static inline void add_pieces(const bf16* x, int64_t stride, int rows, const bf16* w, const Piece* pieces, int count,
                              const float* totals, int64_t total_stride, float* out) {
    alignas(64) float part[TILE_ROWS * COLUMNS];
    for (int p = 0; p < count; x += 2 * pieces[p].steps, w += 64 * pieces[p].steps, ++p) {
        panel(x, stride, rows, w, pieces[p].steps, part);
        float step[COLUMNS], centre[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) step[c] = wide(pieces[p].step[c]);
        for (int c = 0; c < COLUMNS; ++c) centre[c] = pieces[p].centre ? wide(pieces[p].centre[c]) : 0.0f;
        for (int r = 0; r < rows; ++r) {
            const float total = pieces[p].centre ? totals[r * total_stride + p] : 0.0f;
#pragma omp simd
            for (int c = 0; c < COLUMNS; ++c)
                out[r * COLUMNS + c] += step[c] * part[r * COLUMNS + c] + centre[c] * total;
        }
    }
}

// Products of one block of rows with coded panels; sums of inputs are kept from panel to panel.
class CodedRows {
  public:
    // The rows of x that follow; ``linear`` says how inputs are grouped.
    void set(const Linear& linear, const bf16* x, int64_t stride, int rows) {
        x_ = x, stride_ = stride, rows_ = rows;
        const int most = 2 * CHUNK_STEPS, group = linear.group;
        parts_ = (group + most - 1) / most;
        pieces_ = linear.k / group * parts_;
        if (linear.bits != 4) return;
        totals_.resize(size_t(rows) * pieces_);
        for (int r = 0; r < rows; ++r)
            for (int p = 0; p < pieces_; ++p) {
                const int first = p / parts_ * group + p % parts_ * most;
                const int count = std::min(most, group - p % parts_ * most);
                float total = 0.0f;
#pragma omp simd reduction(+ : total)
                for (int i = 0; i < count; ++i) total += wide(x[r * stride + first + i]);
                totals_[size_t(r) * pieces_ + p] = total;
            }
    }

    // out [rows][32] of panel ``index``.
    void run(const Linear& linear, int64_t index, float* out) const {
        const int bits = linear.bits, group = linear.group, most = 2 * CHUNK_STEPS;
        const int64_t bytes = block_bytes(bits, group), parameters = (bits == 4 ? 4 : 2) * COLUMNS;
        const uint8_t* block = reinterpret_cast<const uint8_t*>(linear.panels) + index * (linear.k / group) * bytes;
        const int together = group > most ? 1 : most / group;  // groups that are unpacked at once
        alignas(64) bf16 weights[CHUNK_STEPS * COLUMNS * 2];
        Piece pieces[CHUNK_STEPS];
        std::memset(out, 0, sizeof(float) * rows_ * COLUMNS);
        for (int first = 0; first < pieces_;) {
            int count = 0, steps = 0;
            for (; count < together && first + count < pieces_; ++count) {
                const int p = first + count, begin = p % parts_ * most, n = std::min(most, group - begin) / 2;
                const uint8_t* at = block + p / parts_ * bytes;
                const bf16* step = reinterpret_cast<const bf16*>(at);
                unpack(bits, at + parameters + int64_t(begin / 2) * bits * 8, n, weights + steps * 64);
                pieces[count] = {n, step, bits == 4 ? step + COLUMNS : nullptr};
                steps += n;
            }
            const int64_t input = int64_t(first / parts_) * group + first % parts_ * most;
            for (int r = 0; r < rows_; r += TILE_ROWS) {
                const bf16* x = x_ + r * stride_ + input;
                const float* totals = totals_.data() + size_t(r) * pieces_ + first;
                float* to = out + r * COLUMNS;
                add_pieces(x, stride_, std::min(TILE_ROWS, rows_ - r), weights, pieces, count, totals, pieces_, to);
            }
            first += count;
        }
    }

  private:
    const bf16* x_ = nullptr;
    int64_t stride_ = 0;
    int rows_ = 0, parts_ = 1, pieces_ = 0;
    std::vector<float> totals_;
};
