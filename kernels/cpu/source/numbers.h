// bfloat16 and the few elementary functions of a decoder layer, in forms that a compiler turns into vectors.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

using bf16 = uint16_t;

static inline float wide(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Round to nearest even; a NaN stays one.
static inline bf16 narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return bf16((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : even);
}

static inline float rounded(float x) { return wide(narrow(x)); }

// exp to about one unit in the last place (Cody and Waite's reduction, degree 6). Branch-free; NaN passes,
// large arguments give infinity and small ones zero.
static inline float fast_exp(float x) {
    float z = x < -104.0f ? -104.0f : x;
    z = z > 89.0f ? 89.0f : z;
    float n = std::nearbyint(z * 1.44269504f);
    float r = std::fma(n, -0.693359375f, z);
    r = std::fma(n, 2.12194440e-4f, r);
    float p = 1.38888889e-3f;
    p = std::fma(p, r, 8.33333377e-3f);
    p = std::fma(p, r, 4.16666679e-2f);
    p = std::fma(p, r, 1.66666667e-1f);
    p = std::fma(p, r, 0.5f);
    p = std::fma(p, r, 1.0f);
    p = std::fma(p, r, 1.0f);
    // 2^n in two factors, because n may pass the range of one exponent.
    int whole = int(n), half = whole >> 1;
    uint32_t first = uint32_t(half + 127) << 23, second = uint32_t(whole - half + 127) << 23;
    float a, b;
    std::memcpy(&a, &first, 4);
    std::memcpy(&b, &second, 4);
    return p * a * b;
}

// Gated activations: ids are those of the binding.
enum Activation { SILU = 0, GELU = 1, GELU_TANH = 2 };

static inline float silu(float x) { return x / (1.0f + fast_exp(-x)); }

static inline float gelu_tanh(float x) {
    float inner = 0.79788456f * (x + 0.044715f * x * x * x);
    return x / (1.0f + fast_exp(-2.0f * inner));  // (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y))
}

static inline float gelu(float x) { return 0.5f * x * std::erfc(x * -0.70710678f); }
