// Attention of short spans (decodes, drafts) over a page pool, without copies: online softmax page by page.
//
// The work is the list of (span, KV head, page) in that order, cut into equal parts, one per thread; a (span, head)
// that is cut is merged afterwards. Query heads of one KV head are computed together.
#include <algorithm>
#include <limits>

#include "attend.h"
#include "attention.h"

namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();

class Worker {
  public:
    explicit Worker(const Problem& problem) : p_(problem), group_(problem.shape->heads / problem.shape->kv_heads) {}

    // Pages [a, b) of a segment, into ``into``.
    void run(int64_t segment, int a, int b, Partial& into) {
        const Shape& shape = *p_.shape;
        const int dim = shape.head_dim, page = shape.page;
        const Span& span = p_.spans[segment / shape.kv_heads];
        const int head = int(segment % shape.kv_heads), rows = span.rows * group_;
        into.segment = segment;
        into.most.assign(rows, NONE);
        into.sum.assign(rows, 0.0f);
        into.out.assign(size_t(rows) * dim, 0.0f);
        query_.resize(size_t(rows) * dim);
        weight_.resize(size_t(rows) * page);
        for (int r = 0; r < rows; ++r) {
            const float* from = p_.q + (span.row + r / group_) * p_.q_stride + (head * group_ + r % group_) * dim;
#pragma omp simd
            for (int d = 0; d < dim; ++d) query_[size_t(r) * dim + d] = narrow(from[d]);
        }
        int lowest = span.start, highest = 0;
        for (int i = 0; i < span.rows; ++i) {
            lowest = std::min(lowest, p_.low[span.row + i]);
            highest = std::max(highest, p_.low[span.row + i]);
        }
        const int64_t one = int64_t(page) * dim;
        for (int index = a; index < b; ++index) {
            const int first = std::max(lowest - index * page, 0);
            const int last = std::min(span.start + span.rows - index * page, page);
            const int64_t base = (int64_t(p_.table[span.table + index]) * shape.kv_heads + head) * one + int64_t(first) * dim;
            const bool more = index + 1 < b;
            const int64_t then = more ? (int64_t(p_.table[span.table + index + 1]) * shape.kv_heads + head) * one : 0;
            const int slots = last - first, origin = index * page + first;
            if (slots <= 0) continue;
            dots(rows, p_.k + base, slots, more ? p_.k + then : nullptr);
            const bool masked = origin < highest || origin + slots > span.start;
            for (int r = 0; r < rows; ++r) soften(span, r, origin, slots, masked, into);
            sums(rows, p_.v + base, slots, more ? p_.v + then : nullptr, into.out.data());
        }
    }

    // Writes the rows of a segment; what nobody sees is zero.
    void finish(const Partial& part) const {
        const Shape& shape = *p_.shape;
        const Span& span = p_.spans[part.segment / shape.kv_heads];
        const int head = int(part.segment % shape.kv_heads), dim = shape.head_dim;
        for (int r = 0; r < span.rows * group_; ++r) {
            float* to = p_.out + (int64_t(span.row + r / group_) * shape.heads + head * group_ + r % group_) * dim;
            const float scale = part.sum[r] == 0.0f ? 0.0f : 1.0f / part.sum[r];
            for (int d = 0; d < dim; ++d) to[d] = scale == 0.0f ? 0.0f : part.out[size_t(r) * dim + d] * scale;
        }
    }

  private:
    void dots(int rows, const bf16* k, int slots, const bf16* next) {
        const int dim = p_.shape->head_dim, width = p_.shape->page;
        float* to = weight_.data();
#ifdef VECTOR_DIMS
        if (dim == 64) return scores<64>(query_.data(), rows, k, slots, to, width, next);
        if (dim == 128) return scores<128>(query_.data(), rows, k, slots, to, width, next);
        if (dim == 256) return scores<256>(query_.data(), rows, k, slots, to, width, next);
#endif
        (void)next;
        scores_any(query_.data(), rows, k, slots, dim, to, width);
    }

    void sums(int rows, const bf16* v, int slots, const bf16* next, float* out) {
        const int dim = p_.shape->head_dim, width = p_.shape->page;
        const float* from = weight_.data();
#ifdef VECTOR_DIMS
        if (dim == 64) return values<64>(from, width, rows, v, slots, out, next);
        if (dim == 128) return values<128>(from, width, rows, v, slots, out, next);
        if (dim == 256) return values<256>(from, width, rows, v, slots, out, next);
#endif
        (void)next;
        values_any(from, width, rows, v, slots, dim, out);
    }

    // Scores of one row become weights against the running maximum; earlier sums are rescaled.
    void soften(const Span& span, int r, int origin, int slots, bool masked, Partial& into) {
        float* w = weight_.data() + size_t(r) * p_.shape->page;
        const int row = span.row + r / group_;
        if (p_.shape->soft_cap > 0.0f) {
            const float cap = p_.shape->soft_cap, rate = -2.0f / cap;
#pragma omp simd
            for (int s = 0; s < slots; ++s) w[s] = cap * (2.0f / (1.0f + fast_exp(rate * w[s])) - 1.0f);  // cap · tanh
        }
        if (masked) {
            for (int s = 0; s < slots; ++s) {
                const int slot = origin + s, bit = slot - span.start;
                if (bit < 0 ? slot < p_.low[row] : !(p_.seen[row] >> bit & 1u)) w[s] = NONE;
            }
        }
        float most = into.most[r];
#pragma omp simd reduction(max : most)
        for (int s = 0; s < slots; ++s) most = w[s] > most ? w[s] : most;
        if (most == NONE) {  // nothing visible yet
            bool nan = false;
            for (int s = 0; s < slots; ++s) nan |= w[s] != w[s];
            if (!nan) {
                std::fill(w, w + slots, 0.0f);
                return;
            }
        }
        const float before = into.most[r];
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int s = 0; s < slots; ++s) {
            w[s] = fast_exp(w[s] - most);
            sum += w[s];
        }
        if (masked) {  // exp of -inf is tiny, not zero
            sum = 0.0f;
            for (int s = 0; s < slots; ++s) {
                const int slot = origin + s, bit = slot - span.start;
                if (bit < 0 ? slot < p_.low[row] : !(p_.seen[row] >> bit & 1u)) w[s] = 0.0f;
                sum += w[s];
            }
        }
        rescale(into, r, before, most);
        into.sum[r] += sum;
        into.most[r] = most;
    }

    void rescale(Partial& into, int r, float before, float most) const {
        if (before == most) return;
        const int dim = p_.shape->head_dim;
        const float scale = before == NONE ? 0.0f : fast_exp(before - most);
        into.sum[r] *= scale;
        for (int d = 0; d < dim; ++d) into.out[size_t(r) * dim + d] *= scale;
    }

  public:
    // Joins what two threads found about one segment.
    void merge(Partial& into, const Partial& other) const {
        const int dim = p_.shape->head_dim;
        for (size_t r = 0; r < into.most.size(); ++r) {
            if (other.most[r] == NONE && other.sum[r] == 0.0f) continue;
            const float most = std::max(into.most[r], other.most[r]);
            const float a = into.most[r] == NONE ? 0.0f : fast_exp(into.most[r] - most);
            const float b = other.most[r] == NONE ? 0.0f : fast_exp(other.most[r] - most);
            into.sum[r] = into.sum[r] * a + other.sum[r] * b;
            for (int d = 0; d < dim; ++d) {
                float& to = into.out[r * dim + d];
                to = to * a + other.out[r * dim + d] * b;
            }
            into.most[r] = most;
        }
    }

  private:
    const Problem& p_;
    const int group_;
    std::vector<bf16> query_;
    std::vector<float> weight_;
};

}  // namespace

void Attention::begin(const Problem& problem, int count, int threads) {
    problem_ = problem;
    offset_.assign(size_t(count) + 1, 0);
    for (int i = 0; i < count; ++i)
        offset_[i + 1] = offset_[i] + int64_t(problem.spans[i].last - problem.spans[i].first) * problem.shape->kv_heads;
    cut_.resize(size_t(threads) * 2);
    for (Partial& part : cut_) part.segment = -1;
}

void Attention::run(const Member& me) {
    const int kv_heads = problem_.shape->kv_heads;
    Worker worker(problem_);
    Partial whole;
    int64_t unit, end;
    me.share(offset_.back(), unit, end);
    int slot = 2 * me.thread;
    int span = int(std::upper_bound(offset_.begin(), offset_.end(), unit) - offset_.begin()) - 1;
    while (unit < end) {
        while (unit >= offset_[span + 1]) ++span;
        const int pages = problem_.spans[span].last - problem_.spans[span].first;
        const int64_t inside = unit - offset_[span];
        const int head = int(inside / pages), a = int(inside % pages);
        const int b = int(std::min<int64_t>(pages, a + (end - unit)));
        const bool complete = a == 0 && b == pages;
        Partial& part = complete ? whole : cut_[slot];
        if (!complete) ++slot;
        const int first = problem_.spans[span].first;
        worker.run(int64_t(span) * kv_heads + head, first + a, first + b, part);
        if (complete) worker.finish(part);
        unit += b - a;
    }
    me.wait();
    if (me.thread) return;
    Partial* open = nullptr;
    for (Partial& part : cut_) {
        if (part.segment < 0) continue;
        if (open && open->segment == part.segment) {
            worker.merge(*open, part);
            continue;
        }
        if (open) worker.finish(*open);
        open = &part;
    }
    if (open) worker.finish(*open);
}

extern "C" {

// ``q`` float32 [T, Hq, D] scaled, its rows ``q_stride`` apart; ``k``, ``v`` bfloat16 [N, Hkv, P, D] contiguous; ``out`` float32 [T, Hq * D], only
// rows of the spans are written. ``low`` int32 and ``seen`` uint32 by row of the step.
void attend(const Shape* shape, const Span* spans, int32_t count, const int32_t* table, const int32_t* low,
            const uint32_t* seen, const float* q, int64_t q_stride, const bf16* k, const bf16* v, float* out, int threads) {
    Attention attention;
    attention.begin({shape, spans, table, low, seen, q, q_stride, k, v, out}, count, threads);
    together(threads, [&](const Member& me) { attention.run(me); });
}

// Writes rows of K and V, float32 [T, Hkv, D], both with rows ``stride`` apart, to bfloat16 slots of pools
// [N, Hkv, P, D]: ``where`` int64 [T] is page * P + slot.
void write_kv(int heads, int page, int dim, int64_t rows, const int64_t* where, const float* k_rows,
              const float* v_rows, int64_t stride, bf16* k, bf16* v) {
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t base = where[r] / page * heads * page + where[r] % page;
        for (int head = 0; head < heads; ++head) {
            const float *from_k = k_rows + r * stride + head * dim, *from_v = v_rows + r * stride + head * dim;
            bf16 *to_k = k + (base + int64_t(head) * page) * dim, *to_v = v + (base + int64_t(head) * page) * dim;
#pragma omp simd
            for (int d = 0; d < dim; ++d) {
                to_k[d] = narrow(from_k[d]);
                to_v[d] = narrow(from_v[d]);
            }
        }
    }
}
}
