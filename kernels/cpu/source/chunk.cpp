// Attention of a long chunk of one sequence: keys and values become panels once, then scores and sums are products.
//
// Query heads of a KV head are rows of one matrix. Blocks of rows meet blocks of slots with an online softmax;
// weights are rounded to bfloat16 for the product with V, and their sum is that of the rounded ones.
#include <omp.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "layer.h"

namespace {

constexpr int BLOCK_ROWS = 2 * TILE_ROWS, BLOCK_SLOTS = 256, BLOCK_PANELS = BLOCK_SLOTS / COLUMNS;
constexpr float NONE = -std::numeric_limits<float>::infinity();

struct Chunk {
    int64_t row, rows, start, first;  // first row of the step, rows, committed slots, first page
    const int32_t* table;             // page ids from the span's first page on
    const int32_t* low;               // by row of the step: the first slot it sees
};

// A slot's vector of one head, or null for slots that no row may see.
inline const bf16* vector_at(const Shape& shape, const Chunk& chunk, const bf16* pool, int head, int64_t slot, int64_t lowest,
                             int64_t end) {
    if (slot < lowest || slot >= end) return nullptr;
    const int64_t page = chunk.table[slot / shape.page];
    return pool + ((page * shape.kv_heads + head) * shape.page + slot % shape.page) * shape.head_dim;
}

// 32 slots as one panel of keys: [D/2][32][2].
void pack_keys(const Shape& shape, const Chunk& chunk, const bf16* k, int head, int64_t slot, int64_t lowest, int64_t end,
               bf16* out) {
    const int steps = shape.head_dim / 2;
    uint32_t* pairs = reinterpret_cast<uint32_t*>(out);
    for (int c = 0; c < COLUMNS; ++c) {
        const bf16* from = vector_at(shape, chunk, k, head, slot + c, lowest, end);
        for (int i = 0; i < steps; ++i) {
            uint32_t pair = 0;
            if (from) std::memcpy(&pair, from + 2 * i, 4);
            pairs[i * COLUMNS + c] = pair;
        }
    }
}

// Two slots in every panel of values: panel p of the head begins at out + p * panel.
void pack_values(const Shape& shape, const Chunk& chunk, const bf16* v, int head, int64_t slot, int64_t lowest, int64_t end,
                 int64_t panel, bf16* out) {
    const bf16* a = vector_at(shape, chunk, v, head, slot, lowest, end);
    const bf16* b = vector_at(shape, chunk, v, head, slot + 1, lowest, end);
    for (int d = 0; d < (shape.head_dim + COLUMNS - 1) / COLUMNS * COLUMNS; ++d) {
        bf16* to = out + d / COLUMNS * panel + d % COLUMNS * 2;
        to[0] = a && d < shape.head_dim ? a[d] : bf16(0);
        to[1] = b && d < shape.head_dim ? b[d] : bf16(0);
    }
}

struct Buffers {
    std::vector<bf16> query, weight;
    std::vector<float> score, out, most, sum;
    Buffers(int dim, int wide)
        : query(size_t(BLOCK_ROWS) * dim), weight(size_t(BLOCK_ROWS) * BLOCK_SLOTS), score(size_t(BLOCK_ROWS) * BLOCK_SLOTS),
          out(size_t(BLOCK_ROWS) * wide), most(BLOCK_ROWS), sum(BLOCK_ROWS) {}
};

// Scores of one row, [panels][BLOCK_ROWS][32], become weights; slots outside [low, high) of the block count nothing.
// Returns by how much earlier sums shrink.
float soften(float* score, int panels, int low, int high, float cap, float& most, float& sum, bf16* weight) {
    for (int p = 0; p < panels; ++p) {
        float* s = score + p * BLOCK_ROWS * COLUMNS;
        if (cap > 0.0f) {
            const float rate = -2.0f / cap;
#pragma omp simd
            for (int c = 0; c < COLUMNS; ++c) s[c] = cap * (2.0f / (1.0f + fast_exp(rate * s[c])) - 1.0f);
        }
        const int first = p * COLUMNS;
        if (first < low || first + COLUMNS > high)
            for (int c = 0; c < COLUMNS; ++c)
                if (first + c < low || first + c >= high) s[c] = NONE;
    }
    const float before = most;
    float top = before, check = 0.0f;
    for (int p = 0; p < panels; ++p) {
        const float* s = score + p * BLOCK_ROWS * COLUMNS;
#pragma omp simd reduction(max : top)
        for (int c = 0; c < COLUMNS; ++c) top = s[c] > top ? s[c] : top;
    }
    if (top == NONE) {
        for (int p = 0; p < panels; ++p)
            for (int c = 0; c < COLUMNS; ++c) check += score[p * BLOCK_ROWS * COLUMNS + c] == NONE ? 0.0f : 1.0f;
        if (check == 0.0f) {  // this row sees nothing here
            std::memset(weight, 0, sizeof(bf16) * panels * COLUMNS);
            return 1.0f;
        }
    }
    float added = 0.0f;
    for (int p = 0; p < panels; ++p) {
        const float* s = score + p * BLOCK_ROWS * COLUMNS;
#pragma omp simd reduction(+ : added)
        for (int c = 0; c < COLUMNS; ++c) {
            const bf16 w = narrow(fast_exp(s[c] - top));
            weight[p * COLUMNS + c] = w;
            added += wide(w);
        }
    }
    const float scale = before == NONE ? 0.0f : before == top ? 1.0f : fast_exp(before - top);
    sum = sum * scale + added;
    most = top;
    return scale;
}

}  // namespace

extern "C" {

// Rows [row, row + rows) of a step, a chain behind ``start`` committed slots; row i sees slots [low[row + i],
// start + i]. ``table`` holds the span's page ids from its first page (number 0) on, ``keys`` and ``values`` scratch:
// bfloat16 [Hkv, S, D] and [Hkv, S, D padded to 32], S the slots from page ``first`` on padded to 32. D is even.
void attend_chunk(const Shape* shape, int64_t row, int64_t rows, int64_t start, int64_t first, const int32_t* table,
                  const int32_t* low, const float* q, int64_t q_stride, const bf16* k, const bf16* v, bf16* keys,
                  bf16* values, float* out, int threads) {
    const Chunk chunk{row, rows, start, first, table, low};
    const int dim = shape->head_dim, heads = shape->kv_heads, group = shape->heads / heads;
    const int wide = (dim + COLUMNS - 1) / COLUMNS * COLUMNS, out_panels = wide / COLUMNS;
    const int64_t origin = first * shape->page, end = start + rows;
    const int64_t panels = (end - origin + COLUMNS - 1) / COLUMNS, slots = panels * COLUMNS;
    int64_t lowest = end;
    for (int64_t r = 0; r < rows; ++r) lowest = std::min<int64_t>(lowest, low[row + r]);
    const int64_t folded = rows * group, blocks = (folded + BLOCK_ROWS - 1) / BLOCK_ROWS;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t item = 0; item < heads * panels; ++item) {
            const int head = int(item / panels);
            const int64_t slot = item % panels * COLUMNS;
            pack_keys(*shape, chunk, k, head, origin + slot, lowest, end, keys + (head * slots + slot) * dim);
            for (int c = 0; c < COLUMNS; c += 2)
                pack_values(*shape, chunk, v, head, origin + slot + c, lowest, end, slots * COLUMNS,
                            values + head * slots * wide + (slot + c) * COLUMNS);
        }
        Buffers b(dim, wide);
        float sums[TILE_ROWS * COLUMNS];
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < blocks * heads; ++item) {
            const int64_t begin = (blocks - 1 - item / heads) * BLOCK_ROWS;  // the longest first
            const int head = int(item % heads), count = int(std::min<int64_t>(BLOCK_ROWS, folded - begin));
            const bf16 *head_keys = keys + head * slots * dim, *head_values = values + head * slots * wide;
            int64_t from = end;
            for (int r = 0; r < count; ++r) {
                const int64_t token = row + (begin + r) / group;
                const float* x = q + token * q_stride + (head * group + (begin + r) % group) * dim;
                for (int d = 0; d < dim; ++d) b.query[size_t(r) * dim + d] = narrow(x[d]);
                from = std::min<int64_t>(from, low[token]);
                b.most[r] = NONE;
                b.sum[r] = 0.0f;
            }
            std::fill(b.out.begin(), b.out.end(), 0.0f);
            const int64_t to = start + (begin + count - 1) / group + 1;  // behind the last slot any row sees
            for (int64_t block = (from - origin) / BLOCK_SLOTS * BLOCK_SLOTS; origin + block < to; block += BLOCK_SLOTS) {
                const int n = int(std::min<int64_t>(BLOCK_PANELS, (to - origin - block + COLUMNS - 1) / COLUMNS));
                for (int t = 0; t < count; t += TILE_ROWS)
                    for (int p = 0; p < n; ++p)
                        panel(b.query.data() + size_t(t) * dim, dim, std::min(TILE_ROWS, count - t),
                              head_keys + (block + p * COLUMNS) * dim, dim / 2, b.score.data() + (p * BLOCK_ROWS + t) * COLUMNS);
                for (int r = 0; r < count; ++r) {
                    const int64_t token = (begin + r) / group;
                    const int64_t a = low[row + token] - origin - block, z = start + token + 1 - origin - block;
                    const float scale =
                        soften(b.score.data() + r * COLUMNS, n, int(std::max<int64_t>(a, 0)),
                               int(std::min<int64_t>(z, BLOCK_SLOTS)), shape->soft_cap, b.most[r], b.sum[r],
                               b.weight.data() + r * BLOCK_SLOTS);
                    if (scale != 1.0f)
                        for (int d = 0; d < wide; ++d) b.out[size_t(r) * wide + d] *= scale;
                }
                for (int t = 0; t < count; t += TILE_ROWS) {
                    const int m = std::min(TILE_ROWS, count - t);
                    for (int p = 0; p < out_panels; ++p) {
                        panel(b.weight.data() + t * BLOCK_SLOTS, BLOCK_SLOTS, m, head_values + (p * slots + block) * COLUMNS,
                              n * COLUMNS / 2, sums);
                        for (int r = 0; r < m; ++r)
                            for (int c = 0; c < COLUMNS; ++c)
                                b.out[size_t(t + r) * wide + p * COLUMNS + c] += sums[r * COLUMNS + c];
                    }
                }
            }
            for (int r = 0; r < count; ++r) {
                const int64_t token = row + (begin + r) / group;
                float* y = out + (token * shape->heads + head * group + (begin + r) % group) * dim;
                for (int d = 0; d < dim; ++d) y[d] = b.sum[r] == 0.0f ? 0.0f : b.out[size_t(r) * wide + d] / b.sum[r];
            }
        }
    }
}
}
