// Products of a few to many rows with weights stored in panels, for every row count from one layout.
//
// A panel holds 32 output columns: [K/2][32][2] bfloat16, so one step of two inputs is 128 contiguous bytes,
// whatever the number of rows. Activations are rows of bfloat16, zero-padded to an even length. Products are
// exact in float32 and sums are float32; only their order depends on the machine and on the number of rows.
#pragma once
#include "numbers.h"

constexpr int COLUMNS = 32;
constexpr int AHEAD = 9216;    // bytes of a panel that are asked for before they are needed
constexpr int TILE_ROWS = 12;  // 12 rows by 2 vectors: 24 accumulators of 32 registers

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

static inline __m512bh as_bh(__m512i x) { return (__m512bh)x; }

static inline __m512bh pair(const bf16* x) {
    int32_t bits;
    std::memcpy(&bits, x, 4);
    return as_bh(_mm512_set1_epi32(bits));
}

// One row: four sums per column, because a single chain waits for itself.
static inline void tile_one(const bf16* x, const bf16* w, int steps, float* out) {
    __m512 a0 = _mm512_setzero_ps(), a1 = a0, b0 = a0, b1 = a0, c0 = a0, c1 = a0, d0 = a0, d1 = a0;
    int i = 0;
    for (; i + 4 <= steps; i += 4, w += 256, x += 8) {
        for (int line = 0; line < 8; ++line) _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD + 64 * line, _MM_HINT_T0);
        __m512bh p = pair(x), q = pair(x + 2), r = pair(x + 4), s = pair(x + 6);
        a0 = _mm512_dpbf16_ps(a0, p, as_bh(_mm512_loadu_si512(w)));
        a1 = _mm512_dpbf16_ps(a1, p, as_bh(_mm512_loadu_si512(w + 32)));
        b0 = _mm512_dpbf16_ps(b0, q, as_bh(_mm512_loadu_si512(w + 64)));
        b1 = _mm512_dpbf16_ps(b1, q, as_bh(_mm512_loadu_si512(w + 96)));
        c0 = _mm512_dpbf16_ps(c0, r, as_bh(_mm512_loadu_si512(w + 128)));
        c1 = _mm512_dpbf16_ps(c1, r, as_bh(_mm512_loadu_si512(w + 160)));
        d0 = _mm512_dpbf16_ps(d0, s, as_bh(_mm512_loadu_si512(w + 192)));
        d1 = _mm512_dpbf16_ps(d1, s, as_bh(_mm512_loadu_si512(w + 224)));
    }
    for (; i < steps; ++i, w += 64, x += 2) {
        a0 = _mm512_dpbf16_ps(a0, pair(x), as_bh(_mm512_loadu_si512(w)));
        a1 = _mm512_dpbf16_ps(a1, pair(x), as_bh(_mm512_loadu_si512(w + 32)));
    }
    _mm512_storeu_ps(out, _mm512_add_ps(_mm512_add_ps(a0, b0), _mm512_add_ps(c0, d0)));
    _mm512_storeu_ps(out + 16, _mm512_add_ps(_mm512_add_ps(a1, b1), _mm512_add_ps(c1, d1)));
}

template <int ROWS>
static inline void tile(const bf16* x, int64_t stride, const bf16* w, int steps, float* out) {
    __m512 low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; ++r) low[r] = high[r] = _mm512_setzero_ps();
    for (int i = 0; i < steps; ++i, w += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(w) + AHEAD + 64, _MM_HINT_T0);
        __m512bh first = as_bh(_mm512_loadu_si512(w)), second = as_bh(_mm512_loadu_si512(w + 32));
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            __m512bh p = pair(x + r * stride + 2 * i);
            low[r] = _mm512_dpbf16_ps(low[r], p, first);
            high[r] = _mm512_dpbf16_ps(high[r], p, second);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        _mm512_storeu_ps(out + r * COLUMNS, low[r]);
        _mm512_storeu_ps(out + r * COLUMNS + 16, high[r]);
    }
}

#else  // any machine: plain loops over the columns of a panel, which compilers vectorise

template <int ROWS>
static inline void tile(const bf16* x, int64_t stride, const bf16* w, int steps, float* out) {
    constexpr int STEP = ROWS < 4 ? ROWS : 4;  // as many rows as common register files hold
    for (int first = 0; first < ROWS; first += STEP) {
        const int rows = ROWS - first < STEP ? ROWS - first : STEP;
        float sums[STEP][COLUMNS] = {};
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(w);
        for (int i = 0; i < steps; ++i, pairs += COLUMNS) {
            for (int r = 0; r < rows; ++r) {
                const bf16* at = x + (first + r) * stride + 2 * i;
                const float even = wide(at[0]), odd = wide(at[1]);
#pragma omp simd
                for (int c = 0; c < COLUMNS; ++c) {
                    uint32_t low = pairs[c] << 16, high = pairs[c] & 0xffff0000u;
                    float a, b;
                    std::memcpy(&a, &low, 4);
                    std::memcpy(&b, &high, 4);
                    sums[r][c] += even * a + odd * b;
                }
            }
        }
        for (int r = 0; r < rows; ++r) std::memcpy(out + (first + r) * COLUMNS, sums[r], sizeof sums[r]);
    }
}

static inline void tile_one(const bf16* x, const bf16* w, int steps, float* out) { tile<1>(x, 0, w, steps, out); }

#endif

// Sums of ``rows`` (1 to TILE_ROWS) rows of x with one panel, out [rows][32].
static inline void panel(const bf16* x, int64_t stride, int rows, const bf16* w, int steps, float* out) {
    switch (rows) {
        case 1: return tile_one(x, w, steps, out);
        case 2: return tile<2>(x, stride, w, steps, out);
        case 3: return tile<3>(x, stride, w, steps, out);
        case 4: return tile<4>(x, stride, w, steps, out);
        case 5: return tile<5>(x, stride, w, steps, out);
        case 6: return tile<6>(x, stride, w, steps, out);
        case 7: return tile<7>(x, stride, w, steps, out);
        case 8: return tile<8>(x, stride, w, steps, out);
        case 9: return tile<9>(x, stride, w, steps, out);
        case 10: return tile<10>(x, stride, w, steps, out);
        case 11: return tile<11>(x, stride, w, steps, out);
        default: return tile<12>(x, stride, w, steps, out);
    }
}
