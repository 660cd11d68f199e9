// One decoder layer in two calls, around attention, and what a draft head has in front of it. Rules of rounding are
// those of the torch path: inputs of products are bfloat16, sums float32 and rounded once to bfloat16, the residual
// stream is float32.
#include "coded_panels.h"
#include "parts.h"

#include <algorithm>

namespace {

constexpr int ROW_BLOCK = 240;  // rows that stay in a core's second-level cache while panels pass

inline float scale_of(const float* x, float eps, int width) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < width; ++i) sum += x[i] * x[i];
    return 1.0f / std::sqrt(sum / width + eps);
}

void to_bf16(const float* x, int width, bf16* out) {
#pragma omp simd
    for (int i = 0; i < width; ++i) out[i] = narrow(x[i]);
}

// Rows of x [*, k], those of ``keep`` if given, as products take them.
void narrow_rows(const float* x, const int64_t* keep, int64_t rows, int k, bf16* out, const Member& me) {
    int64_t first, last;
    me.share(rows, first, last);
    for (int64_t r = first; r < last; ++r) {
        bf16* to = out + r * padded(k);
        to_bf16(x + (keep ? keep[r] : r) * k, k, to);
        if (k & 1) to[k] = 0;
    }
}

// Calls ``emit(row, rows, group, sums, second)`` for tiles of rows and groups of panels (one, or two that belong
// together); work is shared by blocks of rows where there are many and by panels where there are few.
template <int GROUP, class Emit>
void product(const bf16* x, int64_t rows, const Linear& linear, const Member& me, Emit emit) {
    const int64_t stride = padded(linear.k);
    const int64_t groups = (linear.n / GROUP + COLUMNS - 1) / COLUMNS;
    const int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t first, last, current = -1;
    me.share(blocks * groups, first, last);
    const bool coded = linear.bits != 16;
    const int64_t second = (coded ? std::min<int64_t>(rows, ROW_BLOCK) : TILE_ROWS) * COLUMNS;
    std::vector<float> sums(second * GROUP);
    CodedRows codes;
    for (int64_t item = first; item < last; ++item) {
        const int64_t block = item / groups, group = item % groups;
        const int64_t begin = rows * block / blocks, end = rows * (block + 1) / blocks;
        const int64_t tiles = (end - begin + TILE_ROWS - 1) / TILE_ROWS;
        if (coded) {
            if (block != current) codes.set(linear, x + begin * stride, stride, int(end - begin));
            current = block;
            for (int g = 0; g < GROUP; ++g) codes.run(linear, group * GROUP + g, sums.data() + g * second);
        }
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t a = begin + (end - begin) * t / tiles, b = begin + (end - begin) * (t + 1) / tiles;
            if (!coded)
                for (int g = 0; g < GROUP; ++g)
                    panel(x + a * stride, stride, int(b - a), linear.panels + (group * GROUP + g) * stride * COLUMNS,
                          int(stride / 2), sums.data() + g * second);
            const float* from = sums.data() + (coded ? a - begin : 0) * COLUMNS;
            emit(a, int(b - a), group, from, from + (GROUP - 1) * second);
        }
    }
}

inline float biased(float sum, const float* bias, int64_t column) { return bias ? sum + bias[column] : sum; }

// A sum as a layer goes on with it.
inline float settled(float sum, const Linear& linear, int64_t column) {
    return linear.bits == 16 ? rounded(biased(sum, linear.bias, column)) : biased(rounded(sum), linear.bias, column);
}

void rotate(float* x, const float* cosine, const float* sine, float scale, int dim, float* scratch) {
    const int half = dim / 2;
    for (int i = 0; i < half; ++i) {
        scratch[i] = x[i + half] * (sine[i] * scale) + x[i] * (cosine[i] * scale);
        scratch[i + half] = x[i] * (sine[i + half] * scale) + x[i + half] * (cosine[i + half] * scale);
    }
    std::memcpy(x, scratch, sizeof(float) * dim);
}

template <int KIND>
inline float activate(float x) {
    return KIND == SILU ? silu(x) : KIND == GELU_TANH ? gelu_tanh(x) : gelu(x);
}

template <int KIND>
void gate_with(const Linear& linear, const bf16* x, int64_t rows, bf16* out, int64_t stride, const Member& me) {
    const int inner = linear.n / 2;
    const float* bias = linear.bias;
    product<2>(x, rows, linear, me, [&](int64_t row, int n, int64_t group, const float* sums, const float* second) {
        const int64_t column = group * COLUMNS;
        const int width = int(std::min<int64_t>(COLUMNS, inner - column));
        for (int r = 0; r < n; ++r) {
            bf16* target = out + (row + r) * stride + column;
            const float *g = sums + r * COLUMNS, *u = second + r * COLUMNS;
            if ((width & 1) && stride > inner) target[width] = 0;
            if (linear.bits != 16) {  // as a linear of its own, whose sums are rounded first
#pragma omp simd
                for (int c = 0; c < COLUMNS; ++c) {
                    if (c < width) {
                        const float a = biased(rounded(g[c]), bias, column + c);
                        target[c] = narrow(activate<KIND>(a) * biased(rounded(u[c]), bias, inner + column + c));
                    }
                }
                continue;
            }
            if (bias) {
                for (int c = 0; c < width; ++c)
                    target[c] = narrow(rounded(activate<KIND>(g[c] + bias[column + c])) * (u[c] + bias[inner + column + c]));
                continue;
            }
#pragma omp simd
            for (int c = 0; c < COLUMNS; ++c) {
                if (c < width) target[c] = narrow(rounded(activate<KIND>(g[c])) * u[c]);
            }
        }
    });
}

// activation(gate) * up of panels that take turns; sums, the activated gate and the product are each rounded once.
void gate(const Linear& linear, int activation, const bf16* x, int64_t rows, bf16* out, int64_t stride, const Member& me) {
    if (activation == SILU) return gate_with<SILU>(linear, x, rows, out, stride, me);
    if (activation == GELU_TANH) return gate_with<GELU_TANH>(linear, x, rows, out, stride, me);
    gate_with<GELU>(linear, x, rows, out, stride, me);
}

}  // namespace

void norm(const float* x, const float* gain, float eps, int width, float* out) {
    const float scale = scale_of(x, eps, width);
#pragma omp simd
    for (int i = 0; i < width; ++i) out[i] = x[i] * gain[i] * scale;
}

void norm_to_bf16(const float* x, const float* gain, float eps, int width, bf16* out) {
    if (!gain) return to_bf16(x, width, out);
    const float scale = scale_of(x, eps, width);
#pragma omp simd
    for (int i = 0; i < width; ++i) out[i] = narrow(x[i] * gain[i] * scale);
}

void join(const Join& join, int64_t rows, const float* const* parts, bf16* out, const Member& me) {
    const int whole = join.parts * join.width, stride = padded(whole);
    int64_t first, last;
    me.share(rows, first, last);
    for (int64_t r = first; r < last; ++r) {
        bf16* to = out + r * stride;
        for (int p = 0; p < join.parts; ++p)
            norm_to_bf16(parts[p] + r * join.width, join.gains[p], join.eps, join.width, to + p * join.width);
        if (whole & 1) to[whole] = 0;
    }
}

void multiply(const Linear& linear, int64_t rows, const bf16* x, bool settle, float* y, const Member& me) {
    const int64_t n = linear.n;
    product<1>(x, rows, linear, me, [&](int64_t row, int m, int64_t p, const float* sums, const float*) {
        const int64_t column = p * COLUMNS, width = std::min<int64_t>(COLUMNS, n - column);
        for (int r = 0; r < m; ++r) {
            const float* from = sums + r * COLUMNS;
            float* to = y + (row + r) * n + column;
            if (settle)
                for (int64_t c = 0; c < width; ++c) to[c] = settled(from[c], linear, column + c);
            else
                for (int64_t c = 0; c < width; ++c) to[c] = biased(from[c], linear.bias, column + c);
        }
    });
}

void turn(const Layer& layer, int64_t rows, const float* cosine, const float* sine, int64_t rope_stride, float* qkv,
          const Member& me) {
    const int dim = layer.head_dim, rotated = layer.heads + layer.kv_heads;
    float turned[1024];
    int64_t first, last;
    me.share(rows * rotated, first, last);
    for (int64_t item = first; item < last; ++item) {
        const int64_t row = item / rotated, head = item % rotated;
        float* x = qkv + row * layer.qkv.n + head * dim;
        if (layer.qk_gain) norm(x, layer.qk_gain + head * dim, layer.eps, dim, x);
        rotate(x, cosine + row * rope_stride, sine + row * rope_stride, head < layer.heads ? layer.query_scale : 1.0f, dim,
               turned);
    }
}

void leave(const Layer& layer, int64_t rows, const float* mixed, const float* hidden, const int64_t* keep,
           bf16* narrow_in, bf16* gated, float* spare, float* out, const Member& me) {
    const int width = layer.hidden, stride = padded(width);
    int64_t first, last;
    me.share(rows, first, last);
    narrow_rows(mixed, keep, rows, layer.o.k, narrow_in, me);
    me.wait();
    // What a product adds to ``base``; alone where a norm of whole rows comes first.
    auto add = [&](const Linear& linear, const float* base, const int64_t* rows_of, float* target) {
        return [&linear, base, rows_of, target, width](int64_t row, int m, int64_t p, const float* sums, const float*) {
            const int64_t column = p * COLUMNS, n = std::min<int64_t>(COLUMNS, width - column);
            for (int r = 0; r < m; ++r) {
                const float* from = base ? base + (rows_of ? rows_of[row + r] : row + r) * width + column : nullptr;
                float* to = target + (row + r) * width + column;
                const float* sum = sums + r * COLUMNS;
                if (from)
#pragma omp simd
                    for (int64_t c = 0; c < n; ++c) to[c] = from[c] + settled(sum[c], linear, column + c);
                else
#pragma omp simd
                    for (int64_t c = 0; c < n; ++c) to[c] = settled(sum[c], linear, column + c);
            }
        };
    };
    product<1>(narrow_in, rows, layer.o, me, add(layer.o, layer.attn_out_gain ? nullptr : hidden, keep, out));
    me.wait();
    for (int64_t r = first; r < last; ++r) {
        float* x = out + r * width;
        if (layer.attn_out_gain) {
            norm(x, layer.attn_out_gain, layer.eps, width, x);
            const float* from = hidden + (keep ? keep[r] : r) * width;
            for (int i = 0; i < width; ++i) x[i] += from[i];
        }
        norm_to_bf16(x, layer.mlp_gain, layer.eps, width, narrow_in + r * stride);
        if (width & 1) narrow_in[r * stride + width] = 0;
    }
    me.wait();
    gate(layer.gate_up, layer.activation, narrow_in, rows, gated, padded(layer.down.k), me);
    me.wait();
    const bool normed = layer.mlp_out_gain != nullptr;
    product<1>(gated, rows, layer.down, me, add(layer.down, normed ? nullptr : out, nullptr, normed ? spare : out));
    if (!normed) return;
    me.wait();
    for (int64_t r = first; r < last; ++r) {
        float* x = spare + r * width;
        norm(x, layer.mlp_out_gain, layer.eps, width, x);
        for (int i = 0; i < width; ++i) out[r * width + i] += x[i];
    }
}

extern "C" {

// y [rows, n] = x [rows, k] @ W.T (+ bias), x float32 rounded to bfloat16 in ``scratch`` [rows, padded k].
void linear(const Linear* layer, int64_t rows, const float* x, bf16* scratch, float* y, int threads) {
    together(threads, [=](const Member& me) {
        narrow_rows(x, nullptr, rows, layer->k, scratch, me);
        me.wait();
        multiply(*layer, rows, scratch, false, y, me);
    });
}

// out bfloat16 [rows, inner] = activation(gate) * up of x [rows, k], as in a layer.
void gated(const Linear* linear, int activation, int64_t rows, const float* x, bf16* scratch, bf16* out, int threads) {
    together(threads, [=](const Member& me) {
        narrow_rows(x, nullptr, rows, linear->k, scratch, me);
        me.wait();
        gate(*linear, activation, scratch, rows, out, linear->n / 2, me);
    });
}

// y [rows, n] settled, of ``parts`` [rows, width] each, joined in ``scratch`` bfloat16 [rows, padded k].
void joined(const Join* entrance, const Linear* linear, int64_t rows, const float* const* parts, bf16* scratch, float* y,
            int threads) {
    together(threads, [=](const Member& me) {
        join(*entrance, rows, parts, scratch, me);
        me.wait();
        multiply(*linear, rows, scratch, true, y, me);
    });
}

// y [rows, width] = x normed by its gain, row by row.
void norm_rows(const float* gain, float eps, int width, int64_t rows, const float* x, float* y) {
    for (int64_t r = 0; r < rows; ++r) norm(x + r * width, gain, eps, width, y + r * width);
}

// The way into attention: join, q/k/v, optional q/k norm, rotation. ``parts`` [rows, width] each; ``cosine`` and
// ``sine`` rows of ``rope_stride`` floats; ``qkv`` float32 [rows, Hq + 2 Hkv, D]; ``scratch`` bfloat16 [rows, padded k].
void joined_in(const Join* entrance, const Layer* layer, int64_t rows, const float* const* parts, const float* cosine,
               const float* sine, int64_t rope_stride, bf16* scratch, float* qkv, int threads) {
    together(threads, [=](const Member& me) {
        join(*entrance, rows, parts, scratch, me);
        me.wait();
        multiply(layer->qkv, rows, scratch, true, qkv, me);
        me.wait();
        turn(*layer, rows, cosine, sine, rope_stride, qkv, me);
    });
}

// The same of a layer that norms the stream ``hidden`` [rows, H].
void layer_in(const Layer* layer, int64_t rows, const float* hidden, const float* cosine, const float* sine,
              int64_t rope_stride, bf16* scratch, float* qkv, int threads) {
    const Join normed{{layer->attn_gain}, layer->eps, 1, layer->hidden, 0};
    joined_in(&normed, layer, rows, &hidden, cosine, sine, rope_stride, scratch, qkv, threads);
}

// The way out of attention: o, residual, norm, gate and up, activation, down, residual.
// ``mixed`` [T, q width] float32 and ``hidden`` [T, H]; ``keep`` int64 [rows] names the rows that go on, or null;
// ``out`` [rows, H] must not be ``hidden``. Scratch: ``narrow_in`` bfloat16 [rows, max(padded widths of q and H)],
// ``gated`` bfloat16 [rows, padded inner], ``spare`` float32 [rows, H] where a norm follows the MLP.
void layer_out(const Layer* layer, int64_t rows, const float* mixed, const float* hidden, const int64_t* keep,
               bf16* narrow_in, bf16* gated, float* spare, float* out, int threads) {
    together(threads, [=](const Member& me) {
        leave(*layer, rows, mixed, hidden, keep, narrow_in, gated, spare, out, me);
    });
}
}
