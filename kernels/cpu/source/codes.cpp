// Coded KV pages to bfloat16: what torch's decode of each format gives, bit for bit, in one pass over the codes.
//
// A value is rounded once, after products and sums in float32 that are never contracted to fused ones. Every
// thread takes an equal share of (page, head) parts; few parts are done by the caller alone. A head is WIDEST
// elements at most.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
#include <omp.h>

#include "numbers.h"

namespace {

constexpr int64_t WIDEST = 512;  // a head that parameters are kept for
constexpr int64_t ALONE = 32768;  // elements that are not worth waking threads for

inline float as_float(uint32_t bits) {
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Half to single precision, exactly.
inline float half(uint16_t x) {
    uint32_t sign = uint32_t(x & 0x8000u) << 16, rest = uint32_t(x & 0x7fffu) << 13;
    float normal = as_float(rest + (112u << 23)), tiny = as_float(rest + (113u << 23)) - as_float(113u << 23);
    float value = (x & 0x7fffu) < 0x400u ? tiny : normal;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return as_float(bits | sign);
}

// A float of ``mantissa`` bits and bias ``bias`` whose sign was taken off, exactly; subnormals included.
template <int mantissa, uint32_t bias>
inline float small(uint32_t code) {
    uint32_t bits = (code << (23 - mantissa)) + ((127u - bias) << 23);
    float tiny = as_float(bits + (1u << 23)) - as_float((128u - bias) << 23);
    return code < (1u << mantissa) ? tiny : as_float(bits);
}

inline float e4m3(uint8_t code) {
    float value = small<3, 7>(code & 0x7fu);
    return code & 0x80u ? -value : value;
}

inline float e2m1(uint32_t code) {
    float value = small<1, 1>(code & 7u);
    return code & 8u ? -value : value;
}

inline float int8(uint8_t code) { return float(int8_t(code)); }

template <float (*value)(uint8_t)>
void bytes(const uint8_t* codes, const uint16_t* scales, const float* steps, const int64_t* pages, int64_t n,
           int64_t heads, int64_t slots, int64_t dim, bf16* out, int threads) {
#pragma omp parallel for num_threads(threads) if (n * heads * slots * dim > ALONE) schedule(static)
    for (int64_t part = 0; part < n * heads; part++) {
        int64_t source = pages[part / heads] * heads + part % heads;
        for (int64_t slot = 0; slot < slots; slot++) {
            const uint8_t* from = codes + (source * slots + slot) * dim;
            bf16* to = out + (part * slots + slot) * dim;
            float scale = scales ? half(scales[source * slots + slot]) : steps[part % heads];
#pragma omp simd
            for (int64_t d = 0; d < dim; d++) to[d] = narrow(value(from[d]) * scale);
        }
    }
}

void nibbles(const uint8_t* codes, const uint8_t* scales, const float* table, const int64_t* pages, int64_t n,
             int64_t heads, int64_t slots, int64_t dim, int64_t block, bf16* out, int threads) {
    int64_t wide = dim / 2, blocks = wide / block;  // of half a row: low bits first, then high ones
#pragma omp parallel for num_threads(threads) if (n * heads * slots * dim > ALONE) schedule(static)
    for (int64_t part = 0; part < n * heads; part++) {
        int64_t source = pages[part / heads] * heads + part % heads;
        for (int64_t slot = 0; slot < slots; slot++) {
            const uint8_t* from = codes + (source * slots + slot) * wide;
            const uint8_t* scale = scales + (source * slots + slot) * 2 * blocks;
            bf16* to = out + (part * slots + slot) * dim;
            float steps[WIDEST];
            for (int64_t b = 0; b < 2 * blocks; b++)
                for (int64_t d = 0; d < block; d++) steps[b * block + d] = table[scale[b]];
#pragma omp simd
            for (int64_t d = 0; d < wide; d++) to[d] = narrow(e2m1(from[d] & 15u) * steps[d]);
#pragma omp simd
            for (int64_t d = 0; d < wide; d++) to[wide + d] = narrow(e2m1(uint32_t(from[d]) >> 4) * steps[wide + d]);
        }
    }
}

template <int bits>
void keys(const uint8_t* codes, const uint16_t* low, const uint16_t* step, const int64_t* pages, int64_t n,
          int64_t parts, int64_t size, int64_t dim, bf16* out, int threads) {
    constexpr int per = 8 / bits, mask = (1 << bits) - 1;
#pragma omp parallel for num_threads(threads) if (n * parts * size * per * dim > ALONE) schedule(static)
    for (int64_t part = 0; part < n * parts; part++) {
        int64_t source = pages[part / parts] * parts + part % parts;
        float lows[WIDEST], steps[WIDEST];
        for (int64_t d = 0; d < dim; d++) {
            lows[d] = half(low[source * dim + d]);
            steps[d] = half(step[source * dim + d]);
        }
        for (int p = 0; p < per; p++)
            for (int64_t j = 0; j < size; j++) {
                const uint8_t* from = codes + (source * size + j) * dim;
                bf16* to = out + ((part * per + p) * size + j) * dim;
#pragma omp simd
                for (int64_t d = 0; d < dim; d++)
                    to[d] = narrow(lows[d] + float((from[d] >> (p * bits)) & mask) * steps[d]);
            }
    }
}

template <int bits>
void values(const uint8_t* codes, const uint16_t* low, const uint16_t* step, const int64_t* pages, int64_t n,
            int64_t heads, int64_t slots, int64_t dim, int64_t group, bf16* out, int threads) {
    constexpr int per = 8 / bits, mask = (1 << bits) - 1;
    int64_t size = slots / per, groups = dim / group;
#pragma omp parallel for num_threads(threads) if (n * heads * slots * dim > ALONE) schedule(static)
    for (int64_t part = 0; part < n * heads; part++) {
        int64_t source = pages[part / heads] * heads + part % heads;
        for (int64_t slot = 0; slot < slots; slot++) {
            int shift = int(slot / size) * bits;
            const uint8_t* from = codes + (source * size + slot % size) * dim;
            bf16* to = out + (part * slots + slot) * dim;
            for (int64_t g = 0; g < groups; g++) {
                int64_t at = (source * slots + slot) * groups + g;
                float a = half(low[at]), b = half(step[at]);
#pragma omp simd
                for (int64_t d = g * group; d < (g + 1) * group; d++)
                    to[d] = narrow(float((from[d] >> shift) & mask) * b + a);
            }
        }
    }
}

}  // namespace

extern "C" {

// One byte an element [N, heads, slots, dim], E4M3 or (``integers``) int8; scales half [N, heads, slots], or
// null and ``steps`` float32 [heads].
void decode_bytes(int32_t integers, const uint8_t* codes, const uint16_t* scales, const float* steps,
                  const int64_t* pages, int64_t n, int64_t heads, int64_t slots, int64_t dim, bf16* out,
                  int32_t threads) {
    (integers ? bytes<int8> : bytes<e4m3>)(codes, scales, steps, pages, n, heads, slots, dim, out, threads);
}

// E2M1, byte i of a row holding dims i and i + dim / 2; scale bytes [N, heads, slots, dim / block] are looked
// up in ``table`` float32 [256].
void decode_nibbles(const uint8_t* codes, const uint8_t* scales, const float* table, const int64_t* pages,
                    int64_t n, int64_t heads, int64_t slots, int64_t dim, int64_t block, bf16* out,
                    int32_t threads) {
    nibbles(codes, scales, table, pages, n, heads, slots, dim, block, out, threads);
}

// Keys of 1, 2 or 4 bits grouped per channel: codes [N, parts, size, dim], parts being heads times groups; low
// and step half [N, parts, dim].
void decode_keys(int32_t bits, const uint8_t* codes, const uint16_t* low, const uint16_t* step,
                 const int64_t* pages, int64_t n, int64_t parts, int64_t size, int64_t dim, bf16* out,
                 int32_t threads) {
    auto run = bits == 4 ? keys<4> : bits == 2 ? keys<2> : keys<1>;
    run(codes, low, step, pages, n, parts, size, dim, out, threads);
}

// Values of 1, 2 or 4 bits grouped per token: codes [N, heads, slots * bits / 8, dim]; low and step half
// [N, heads, slots, dim / group].
void decode_values(int32_t bits, const uint8_t* codes, const uint16_t* low, const uint16_t* step,
                   const int64_t* pages, int64_t n, int64_t heads, int64_t slots, int64_t dim, int64_t group,
                   bf16* out, int32_t threads) {
    auto run = bits == 4 ? values<4> : bits == 2 ? values<2> : values<1>;
    run(codes, low, step, pages, n, heads, slots, dim, group, out, threads);
}
}
