// New rows of K or V to coded pages, one call a step and layer: the bytes that torch's encode of each format
// stores, rounding by rounding.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
#include <omp.h>

#include "numbers.h"

namespace {

constexpr int64_t ALONE = 16384;  // elements that are not worth waking threads for

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// |x| to half precision, nearest even; x is finite and at most 65504.
inline uint16_t half_of(float x) {
    if (x < 6.103515625e-05f) return uint16_t(std::nearbyint(x * 16777216.0f));
    uint32_t bits = bits_of(x);
    return uint16_t(((bits + 0xfffu + ((bits >> 13) & 1u)) >> 13) - (112u << 10));
}

inline float of_half(uint16_t x) {  // positive ones
    if (x < 0x400u) return float(x) * 5.9604644775390625e-08f;
    uint32_t bits = (uint32_t(x) << 13) + (112u << 23);
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline uint8_t to_e4m3(float x) {
    uint32_t sign = bits_of(x) >> 24 & 0x80u;
    if (x != x) return uint8_t(sign | 0x7fu);
    float a = std::fabs(x) > 448.0f ? 448.0f : std::fabs(x);
    uint32_t bits = bits_of(a);
    uint32_t normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
    uint32_t tiny = uint32_t(std::nearbyint(a * 512.0f));
    return uint8_t(sign | (a < 0.015625f ? tiny : normal));
}

inline uint8_t to_int8(float x) {
    float y = std::nearbyint(x);
    y = y < -127.0f ? -127.0f : y;
    return uint8_t(int8_t(y > 127.0f ? 127.0f : y));
}

inline float single(float x) { return x; }
inline float single(bf16 x) { return wide(x); }

template <class T>
void bytes(int32_t integers, const T* x, int64_t stride, const int64_t* where, int64_t rows, int64_t heads,
           int64_t slots, int64_t dim, uint8_t* codes, uint16_t* scales, int32_t threads) {
    float ratio = float((1.0 + 1.0 / 1024.0) / (integers ? 127.0 : 448.0));
#pragma omp parallel for num_threads(threads) if (rows * heads * dim > ALONE) schedule(static)
    for (int64_t part = 0; part < rows * heads; part++) {
        int64_t row = part / heads, head = part % heads;
        const T* from = x + row * stride + head * dim;
        int64_t at = (where[row] / slots * heads + head) * slots + where[row] % slots;
        float top = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t d = 0; d < dim; d++) {
            float a = std::fabs(single(from[d]));
            top = a > top ? a : top;
        }
        float scale = top * ratio;
        scale += 5.9604644775390625e-08f;
        scales[at] = half_of(scale > 65504.0f ? 65504.0f : scale);
        float step = of_half(scales[at]);
        uint8_t* to = codes + at * dim;
        if (integers) {
            for (int64_t d = 0; d < dim; d++) to[d] = to_int8(single(from[d]) / step);
        } else {
            for (int64_t d = 0; d < dim; d++) to[d] = to_e4m3(single(from[d]) / step);
        }
    }
}

}  // namespace

extern "C" {

// Rows x [rows, heads, dim], bfloat16 or (``floats``) float32, ``stride`` elements from row to row and heads side
// by side, to slots ``where``: codes [N, heads, slots, dim] in E4M3 or (``integers``) int8, and half scales
// [N, heads, slots] of each row's largest.
void encode_bytes(int32_t integers, int32_t floats, const void* x, int64_t stride, const int64_t* where,
                  int64_t rows, int64_t heads, int64_t slots, int64_t dim, uint8_t* codes, uint16_t* scales,
                  int32_t threads) {
    if (floats)
        bytes(integers, (const float*)x, stride, where, rows, heads, slots, dim, codes, scales, threads);
    else
        bytes(integers, (const bf16*)x, stride, where, rows, heads, slots, dim, codes, scales, threads);
}
}
