// Attention of a step's short spans as the work of a team.
#pragma once
#include <vector>

#include "layer.h"
#include "team.h"

extern "C" {

// Rows [row, row + rows) of the step see slots [low, start) each, and of the slots from ``start`` on those in
// their bit mask. ``table`` is where the span's page ids begin; pages [first, last) hold what any row may see.
struct Span {
    int32_t row, rows, start, first, last, table;
};

void write_kv(int heads, int page, int dim, int64_t rows, const int64_t* where, const float* k_rows, const float* v_rows,
              int64_t stride, bf16* k, bf16* v);
}

// What a thread found out about the rows of one (span, head): maxima, sums of weights, sums of values.
struct Partial {
    int64_t segment = -1;  // span * kv_heads + head
    std::vector<float> most, sum, out;
};

// Arguments as of ``attend``.
struct Problem {
    const Shape* shape;
    const Span* spans;
    const int32_t* table;
    const int32_t* low;
    const uint32_t* seen;
    const float* q;
    int64_t q_stride;
    const bf16 *k, *v;
    float* out;
};

class Attention {
  public:
    // What comes next, told by one member before the others go on.
    void begin(const Problem& problem, int count, int threads);

    // The work of a member; all results are there when all have returned.
    void run(const Member& me);

  private:
    Problem problem_{};
    std::vector<int64_t> offset_;  // units before each span
    std::vector<Partial> cut_;     // first and last segment of each thread, where cut
};
