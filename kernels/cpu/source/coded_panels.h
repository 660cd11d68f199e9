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

// The weights of a pair of inputs with 32 columns, exact in bfloat16; the next codes of the panel are asked for.
template <int BITS>
static inline void pair_at(const uint8_t* codes, __m512i table, __m512i& low, __m512i& high) {
    _mm_prefetch(reinterpret_cast<const char*>(codes) + AHEAD / 2, _MM_HINT_T0);
    if (BITS == 4) {
        const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
        low = _mm512_permutexvar_epi16(both, table);  // five bits choose, the fifth does not matter
        high = _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table);
        return;
    }
    __m512 wide[4];
    for (int i = 0; i < 4; ++i)
        wide[i] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + i)));
    low = (__m512i)_mm512_cvtne2ps_pbh(wide[1], wide[0]);
    high = (__m512i)_mm512_cvtne2ps_pbh(wide[3], wide[2]);
}

template <int BITS>
static inline void unpack_as(const uint8_t* codes, int steps, bf16* out) {
    const __m512i table = _mm512_loadu_si512(NIBBLES.values);
    for (int i = 0; i < steps; ++i, codes += 8 * BITS, out += 64) {
        __m512i low, high;
        pair_at<BITS>(codes, table, low, high);
        _mm512_storeu_si512(out, low);
        _mm512_storeu_si512(out + 32, high);
    }
}

static inline void unpack(int bits, const uint8_t* codes, int steps, bf16* out) {
    bits == 4 ? unpack_as<4>(codes, steps, out) : unpack_as<8>(codes, steps, out);
}

// Sums of one row with a piece of a panel whose weights are unpacked in registers, in the order of ``tile_one``.
template <int BITS>
static inline void one_row_as(const bf16* x, const uint8_t* codes, int steps, float* out) {
    const __m512i table = _mm512_loadu_si512(NIBBLES.values);
    __m512 first[4], second[4];
    for (int j = 0; j < 4; ++j) first[j] = second[j] = _mm512_setzero_ps();
    int i = 0;
    auto add = [&](int j) {
        __m512i low, high;
        pair_at<BITS>(codes, table, low, high);
        const __m512bh both = pair(x);
        first[j] = _mm512_dpbf16_ps(first[j], both, as_bh(low));
        second[j] = _mm512_dpbf16_ps(second[j], both, as_bh(high));
        codes += 8 * BITS, x += 2;
    };
    for (; i + 4 <= steps; i += 4) add(0), add(1), add(2), add(3);
    for (; i < steps; ++i) add(0);
    _mm512_storeu_ps(out, _mm512_add_ps(_mm512_add_ps(first[0], first[1]), _mm512_add_ps(first[2], first[3])));
    _mm512_storeu_ps(out + 16, _mm512_add_ps(_mm512_add_ps(second[0], second[1]), _mm512_add_ps(second[2], second[3])));
}

static inline void one_row(int bits, const bf16* x, const uint8_t* codes, int steps, float* out) {
    bits == 4 ? one_row_as<4>(x, codes, steps, out) : one_row_as<8>(x, codes, steps, out);
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

static inline void one_row(int bits, const bf16* x, const uint8_t* codes, int steps, float* out) {
    alignas(64) bf16 weights[CHUNK_STEPS * COLUMNS * 2];
    unpack(bits, codes, steps, weights);
    tile_one(x, weights, steps, out);
}

#endif

// A part of a group, or a whole one, whose weights lie unpacked: its sum counts ``step`` times, that of its inputs
// ``centre`` times.
struct Piece {
    int steps;
    const bf16 *step, *centre;
};

// Adds what a piece comes to, ``part`` [rows][32], to out; ``totals`` of its inputs lie ``stride`` apart by row.
static inline void add_piece(const Piece& piece, const float* part, int rows, const float* totals, int64_t stride, float* out) {
    float step[COLUMNS], centre[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) step[c] = wide(piece.step[c]);
    for (int c = 0; c < COLUMNS; ++c) centre[c] = piece.centre ? wide(piece.centre[c]) : 0.0f;
    for (int r = 0; r < rows; ++r) {
        const float total = piece.centre ? totals[r * stride] : 0.0f;
#pragma omp simd
        for (int c = 0; c < COLUMNS; ++c) out[r * COLUMNS + c] += step[c] * part[r * COLUMNS + c] + centre[c] * total;
    }
}

// Adds the pieces to out [rows][32], rows 1 to TILE_ROWS.
static inline void add_pieces(const bf16* x, int64_t stride, int rows, const bf16* w, const Piece* pieces, int count,
                              const float* totals, int64_t total_stride, float* out) {
    alignas(64) float part[TILE_ROWS * COLUMNS];
    for (int p = 0; p < count; x += 2 * pieces[p].steps, w += 64 * pieces[p].steps, ++p) {
        panel(x, stride, rows, w, pieces[p].steps, part);
        add_piece(pieces[p], part, rows, totals + p, total_stride, out);
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
        // Piece ``p``, and where its codes begin.
        auto piece = [&](int p, const uint8_t*& codes) -> Piece {
            const int begin = p % parts_ * most;
            const uint8_t* at = block + p / parts_ * bytes;
            const bf16* step = reinterpret_cast<const bf16*>(at);
            codes = at + parameters + int64_t(begin / 2) * bits * 8;
            return {std::min(most, group - begin) / 2, step, bits == 4 ? step + COLUMNS : nullptr};
        };
        const uint8_t* codes;
        if (rows_ == 1) {
            alignas(64) float part[COLUMNS];
            const bf16* x = x_;
            for (int p = 0; p < pieces_; ++p) {
                const Piece one = piece(p, codes);
                one_row(bits, x, codes, one.steps, part);
                add_piece(one, part, 1, totals_.data() + p, 1, out);
                x += 2 * one.steps;
            }
            return;
        }
        for (int first = 0; first < pieces_;) {
            int count = 0, steps = 0;
            for (; count < together && first + count < pieces_; ++count) {
                pieces[count] = piece(first + count, codes);
                unpack(bits, codes, pieces[count].steps, weights + steps * 64);
                steps += pieces[count].steps;
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
