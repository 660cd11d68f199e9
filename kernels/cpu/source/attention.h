// Scores and sums of one KV head of one page, for the query rows of one sequence.
//
// ``q`` bfloat16 [rows, D]; ``k``, ``v`` bfloat16 [slots, D] as they lie in the page; ``p`` float32 [rows, slots].
// DIM is the head size when it is known at compile time, else 0. Keys and values are read once per block of rows,
// and the lines at ``next`` (of the page that follows) are asked for along the way.
#pragma once
#include "numbers.h"

static inline void ask(const bf16* next, int element) {
    if (next) __builtin_prefetch(next + element);
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

// Sums of 16 vectors, one per lane: halves are paired inside lanes of 128 bits first, then the lanes are joined.
static inline __m512 sums_of(const __m512* x) {
    __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[i], x[i + 8]), _mm512_unpackhi_ps(x[i], x[i + 8]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)  // each lane of b[i]: its sums of x[i], x[i + 4], x[i + 8], x[i + 12]
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[i], a[i + 4]), _mm512_unpackhi_ps(a[i], a[i + 4]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[i], b[i + 2], 0x88), _mm512_shuffle_f32x4(b[i], b[i + 2], 0xdd));
    const __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
    return _mm512_permutexvar_ps(order, d);
}

template <int DIM, bool FULL>
static inline void scores_16(const bf16* q, int rows, const bf16* k, int n, float* p, int width) {
    constexpr int PARTS = DIM / 32;
    for (int r = 0; r < rows; ++r) {
        __m512bh query[PARTS];
#pragma GCC unroll 8
        for (int j = 0; j < PARTS; ++j) query[j] = (__m512bh)_mm512_loadu_si512(q + r * DIM + 32 * j);
        __m512 x[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            x[i] = _mm512_setzero_ps();
            if (FULL || i < n) {
#pragma GCC unroll 8
                for (int j = 0; j < PARTS; ++j)
                    x[i] = _mm512_dpbf16_ps(x[i], (__m512bh)_mm512_loadu_si512(k + i * DIM + 32 * j), query[j]);
            }
        }
        if (FULL)
            _mm512_storeu_ps(p + r * width, sums_of(x));
        else
            _mm512_mask_storeu_ps(p + r * width, __mmask16((1u << n) - 1), sums_of(x));
    }
}

template <int DIM>
static void scores(const bf16* q, int rows, const bf16* k, int slots, float* p, int width, const bf16* next) {
    int s = 0;
    for (; s + 16 <= slots; s += 16) {
        for (int element = 0; element < 16 * DIM; element += 32) ask(next, s * DIM + element);
        scores_16<DIM, true>(q, rows, k + s * DIM, 16, p + s, width);
    }
    if (s < slots) scores_16<DIM, false>(q, rows, k + s * DIM, slots - s, p + s, width);
}

template <int DIM, int ROWS>
static void add_values(const float* p, int width, const bf16* v, int slots, float* out, const bf16* next) {
    constexpr int PARTS = DIM / 16;
    __m512 sum[ROWS][PARTS];
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < PARTS; ++j) sum[r][j] = _mm512_loadu_ps(out + r * DIM + 16 * j);
    for (int s = 0; s < slots; ++s) {
        for (int line = 0; line < DIM / 32; ++line) ask(next, s * DIM + line * 32);
        __m512 value[PARTS];
#pragma GCC unroll 16
        for (int j = 0; j < PARTS; ++j)
            value[j] = _mm512_castsi512_ps(_mm512_slli_epi32(
                _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + s * DIM + 16 * j))), 16));
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            const __m512 weight = _mm512_set1_ps(p[r * width + s]);
#pragma GCC unroll 16
            for (int j = 0; j < PARTS; ++j) sum[r][j] = _mm512_fmadd_ps(weight, value[j], sum[r][j]);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < PARTS; ++j) _mm512_storeu_ps(out + r * DIM + 16 * j, sum[r][j]);
}

template <int DIM>
static void values(const float* p, int width, int rows, const bf16* v, int slots, float* out, const bf16* next) {
    constexpr int MOST = DIM >= 256 ? 1 : DIM >= 128 ? 2 : 4;  // as many rows as fit into registers
    for (int r = 0; r < rows; r += MOST, next = nullptr) {
        const float* from = p + r * width;
        float* to = out + r * DIM;
        const int n = rows - r < MOST ? rows - r : MOST;
        if (n == 1) add_values<DIM, 1>(from, width, v, slots, to, next);
        if (n == 2) add_values<DIM, 2>(from, width, v, slots, to, next);
        if (n == 3) add_values<DIM, 3>(from, width, v, slots, to, next);
        if (n == 4) add_values<DIM, 4>(from, width, v, slots, to, next);
    }
}

#define VECTOR_DIMS 1
#endif

// Any head size on any machine.
static void scores_any(const bf16* q, int rows, const bf16* k, int slots, int dim, float* p, int width) {
    for (int s = 0; s < slots; ++s)
        for (int r = 0; r < rows; ++r) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int d = 0; d < dim; ++d) sum += wide(q[r * dim + d]) * wide(k[s * dim + d]);
            p[r * width + s] = sum;
        }
}

static void values_any(const float* p, int width, int rows, const bf16* v, int slots, int dim, float* out) {
    for (int s = 0; s < slots; ++s)
        for (int r = 0; r < rows; ++r) {
            const float weight = p[r * width + s];
#pragma omp simd
            for (int d = 0; d < dim; ++d) out[r * dim + d] += weight * wide(v[s * dim + d]);
        }
}
