// One decoder layer in two calls, around attention. Rules of rounding are those of the torch path: inputs of
// products are bfloat16, sums float32 and rounded once to bfloat16, the residual stream is float32.
#include "coded_panels.h"
#include "layer.h"
#include "team.h"

#include <omp.h>

#include <algorithm>

namespace {

constexpr int ROW_BLOCK = 240;  // rows that stay in a core's second-level cache while panels pass

// A share [first, last) of n things for one of ``threads``.
inline void share(int64_t n, int thread, int threads, int64_t& first, int64_t& last) {
    first = n * thread / threads;
    last = n * (thread + 1) / threads;
}

inline int padded(int k) { return (k + 1) & ~1; }

void norm(const float* x, const float* gain, float eps, int width, float* out) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < width; ++i) sum += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(sum / width + eps);
#pragma omp simd
    for (int i = 0; i < width; ++i) out[i] = x[i] * gain[i] * scale;
}

void norm_to_bf16(const float* x, const float* gain, float eps, int width, bf16* out) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < width; ++i) sum += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(sum / width + eps);
#pragma omp simd
    for (int i = 0; i < width; ++i) out[i] = narrow(x[i] * gain[i] * scale);
    if (width & 1) out[width] = 0;
}

void to_bf16(const float* x, int width, bf16* out) {
#pragma omp simd
    for (int i = 0; i < width; ++i) out[i] = narrow(x[i]);
    if (width & 1) out[width] = 0;
}

// Calls ``emit(row, rows, group, sums, second)`` for tiles of rows and groups of panels (one, or two that belong
// together); work is shared by blocks of rows where there are many and by panels where there are few.
template <int GROUP, class Emit>
void product(const bf16* x, int64_t rows, const Linear& linear, int thread, int threads, Emit emit) {
    const int64_t stride = padded(linear.k);
    const int64_t groups = (linear.n / GROUP + COLUMNS - 1) / COLUMNS;
    const int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t first, last, current = -1;
    share(blocks * groups, thread, threads, first, last);
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
void gate_with(const Linear& linear, const bf16* x, int64_t rows, bf16* out, int64_t stride, int thread, int threads) {
    const int inner = linear.n / 2;
    const float* bias = linear.bias;
    product<2>(x, rows, linear, thread, threads, [&](int64_t row, int n, int64_t group, const float* sums, const float* second) {
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
void gate(const Linear& linear, int activation, const bf16* x, int64_t rows, bf16* out, int64_t stride, int thread,
          int threads) {
    if (activation == SILU) return gate_with<SILU>(linear, x, rows, out, stride, thread, threads);
    if (activation == GELU_TANH) return gate_with<GELU_TANH>(linear, x, rows, out, stride, thread, threads);
    gate_with<GELU>(linear, x, rows, out, stride, thread, threads);
}

}  // namespace

extern "C" {

// y [rows, n] = x [rows, k] @ W.T (+ bias), x float32 rounded to bfloat16 in ``scratch`` [rows, padded k].
void linear(const Linear* layer, int64_t rows, const float* x, bf16* scratch, float* y, int threads) {
    Barrier barrier;
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        int64_t first, last;
        share(rows, thread, team, first, last);
        const int64_t stride = padded(layer->k);
        for (int64_t r = first; r < last; ++r) to_bf16(x + r * layer->k, layer->k, scratch + r * stride);
        barrier.wait(team);
        product<1>(scratch, rows, *layer, thread, team, [&](int64_t row, int n, int64_t p, const float* sums, const float*) {
            const int64_t column = p * COLUMNS, width = std::min<int64_t>(COLUMNS, layer->n - column);
            for (int r = 0; r < n; ++r)
                for (int64_t c = 0; c < width; ++c)
                    y[(row + r) * layer->n + column + c] = biased(sums[r * COLUMNS + c], layer->bias, column + c);
        });
    }
}

// out bfloat16 [rows, inner] = activation(gate) * up of x [rows, k], as in a layer.
void gated(const Linear* linear, int activation, int64_t rows, const float* x, bf16* scratch, bf16* out, int threads) {
    Barrier barrier;
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        int64_t first, last;
        share(rows, thread, team, first, last);
        const int64_t stride = padded(linear->k);
        for (int64_t r = first; r < last; ++r) to_bf16(x + r * linear->k, linear->k, scratch + r * stride);
        barrier.wait(team);
        gate(*linear, activation, scratch, rows, out, linear->n / 2, thread, team);
    }
}

// The way into attention: norm, q/k/v, optional q/k norm, rotation. ``hidden`` [rows, H]; ``cosine`` and ``sine``
// rows of ``rope_stride`` floats; ``qkv`` float32 [rows, Hq + 2 Hkv, D]; ``scratch`` bfloat16 [rows, padded H].
void layer_in(const Layer* layer, int64_t rows, const float* hidden, const float* cosine, const float* sine,
              int64_t rope_stride, bf16* scratch, float* qkv, int threads) {
    Barrier barrier;
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        const int64_t stride = padded(layer->hidden), n = layer->qkv.n;
        const int dim = layer->head_dim, rotated = layer->heads + layer->kv_heads;
        int64_t first, last;
        share(rows, thread, team, first, last);
        for (int64_t r = first; r < last; ++r)
            norm_to_bf16(hidden + r * layer->hidden, layer->attn_gain, layer->eps, layer->hidden, scratch + r * stride);
        barrier.wait(team);
        product<1>(scratch, rows, layer->qkv, thread, team, [&](int64_t row, int m, int64_t p, const float* sums, const float*) {
            const int64_t column = p * COLUMNS, width = std::min<int64_t>(COLUMNS, n - column);
            for (int r = 0; r < m; ++r)
                for (int64_t c = 0; c < width; ++c)
                    qkv[(row + r) * n + column + c] = settled(sums[r * COLUMNS + c], layer->qkv, column + c);
        });
        barrier.wait(team);
        float turned[1024];
        share(rows * rotated, thread, team, first, last);
        for (int64_t item = first; item < last; ++item) {
            const int64_t row = item / rotated, head = item % rotated;
            float* x = qkv + row * n + head * dim;
            if (layer->qk_gain) norm(x, layer->qk_gain + head * dim, layer->eps, dim, x);
            rotate(x, cosine + row * rope_stride, sine + row * rope_stride, head < layer->heads ? layer->query_scale : 1.0f,
                   dim, turned);
        }
    }
}

// The way out of attention: o, residual, norm, gate and up, activation, down, residual.
// ``mixed`` [T, q width] float32 and ``hidden`` [T, H]; ``keep`` int64 [rows] names the rows that go on, or null;
// ``out`` [rows, H] must not be ``hidden``. Scratch: ``narrow_in`` bfloat16 [rows, max(padded widths of q and H)],
// ``gated`` bfloat16 [rows, padded inner], ``spare`` float32 [rows, H] where a norm follows the MLP.
void layer_out(const Layer* layer, int64_t rows, const float* mixed, const float* hidden, const int64_t* keep,
               bf16* narrow_in, bf16* gated, float* spare, float* out, int threads) {
    Barrier barrier;
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        const int width = layer->hidden, q_width = layer->o.k;
        const int64_t q_stride = padded(q_width), stride = padded(width);
        int64_t first, last;
        share(rows, thread, team, first, last);
        for (int64_t r = first; r < last; ++r)
            to_bf16(mixed + (keep ? keep[r] : r) * q_width, q_width, narrow_in + r * q_stride);
        barrier.wait(team);
        // What a product adds to ``base``; alone where a norm of whole rows comes first.
        auto add = [&](const Linear& linear, const float* base, const int64_t* rows_of, float* target) {
            return [&linear, base, rows_of, target, width](int64_t row, int m, int64_t p, const float* sums, const float*) {
                const int64_t column = p * COLUMNS, n = std::min<int64_t>(COLUMNS, width - column);
                for (int r = 0; r < m; ++r) {
                    const float* from = base ? base + (rows_of ? rows_of[row + r] : row + r) * width + column : nullptr;
                    float* to = target + (row + r) * width + column;
                    for (int64_t c = 0; c < n; ++c) {
                        const float sum = settled(sums[r * COLUMNS + c], linear, column + c);
                        to[c] = from ? from[c] + sum : sum;
                    }
                }
            };
        };
        product<1>(narrow_in, rows, layer->o, thread, team,
                   add(layer->o, layer->attn_out_gain ? nullptr : hidden, keep, out));
        barrier.wait(team);
        for (int64_t r = first; r < last; ++r) {
            float* x = out + r * width;
            if (layer->attn_out_gain) {
                norm(x, layer->attn_out_gain, layer->eps, width, x);
                const float* from = hidden + (keep ? keep[r] : r) * width;
                for (int i = 0; i < width; ++i) x[i] += from[i];
            }
            norm_to_bf16(x, layer->mlp_gain, layer->eps, width, narrow_in + r * stride);
        }
        barrier.wait(team);
        gate(layer->gate_up, layer->activation, narrow_in, rows, gated, padded(layer->down.k), thread, team);
        barrier.wait(team);
        const bool normed = layer->mlp_out_gain != nullptr;
        product<1>(gated, rows, layer->down, thread, team,
                   add(layer->down, normed ? nullptr : out, nullptr, normed ? spare : out));
        if (normed) {
            barrier.wait(team);
            for (int64_t r = first; r < last; ++r) {
                float* x = spare + r * width;
                norm(x, layer->mlp_out_gain, layer->eps, width, x);
                for (int i = 0; i < width; ++i) out[r * width + i] += x[i];
            }
        }
    }
}
}
