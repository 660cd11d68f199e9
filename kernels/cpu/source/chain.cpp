// Greedy drafts of a head of one layer for some sequences: all their steps, in one call.
//
// What was committed since the last draft is fed first, with the target's states; behind the newest token the head goes
// on with its own. Every step runs the parts that the calls of a single step run, in the same order, on the sequences
// that still draft.
#include <algorithm>
#include <limits>
#include <memory>

#include "attend.h"
#include "parts.h"

extern "C" {

// A sequence: committed tokens to be fed, the slot (and position) of the first, how many may be drafted, where its
// table begins.
struct Drafted {
    int32_t fed, start, room, table;
};
}

namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr int64_t BLOCK = 256;

// The largest of some logits and the lowest place that has it; the sum of exp(x - peak) where it is asked for.
struct Best {
    float peak = NONE, sum = 0.0f;
    int64_t place = 0;
    bool nan = false;
};

Best best_of(const float* x, int64_t first, int64_t last, bool sum) {
    Best best;
    for (int64_t begin = first; begin < last; begin += BLOCK) {
        const int64_t end = std::min(begin + BLOCK, last);
        float peak = NONE;
        int bad = 0;
#pragma omp simd reduction(max : peak) reduction(| : bad)
        for (int64_t i = begin; i < end; ++i) {
            peak = x[i] > peak ? x[i] : peak;
            bad |= x[i] != x[i];
        }
        best.nan |= bad != 0;
        if (peak > best.peak) {
            best.peak = peak;
            for (best.place = begin; x[best.place] != peak;) ++best.place;
        }
    }
    if (sum && std::isfinite(best.peak)) {
        float total = 0.0f;
#pragma omp simd reduction(+ : total)
        for (int64_t i = first; i < last; ++i) total += fast_exp(x[i] - best.peak);
        best.sum = total;
    }
    return best;
}

template <class T>
std::unique_ptr<T[]> room_for(int64_t n) {
    return std::make_unique_for_overwrite<T[]>(size_t(n));
}

struct Arguments {
    const Head& head;
    const Shape& shape;
    const Drafted* drafted;
    int count;
    const int64_t* tokens;
    const float* states;
    const int32_t* tables;
    const float* rope;
    bf16 *k, *v;
    double confidence;
    int most;
    int64_t* out;
    int32_t* lengths;
    int threads;
};

class Chain {
  public:
    explicit Chain(const Arguments& a)
        : a_(a), layer_(*a.head.layer), hidden_(layer_.hidden), q_width_(layer_.heads * layer_.head_dim), chance_(a.count, 1.0) {
        for (int i = 0; i < a.count; ++i) {
            const Drafted& d = a.drafted[i];
            live_.push_back(i);
            spans_.push_back({int(tokens_.size()), d.fed, d.start, 0, 0, d.table});
            for (int j = 0; j < d.fed; ++j) add_row(d, a.tokens[tokens_.size()], d.start + j, (2u << j) - 1);
            keep_.push_back(int64_t(tokens_.size()) - 1);
            a.lengths[i] = 0;
        }
        const int64_t rows = rows_of(), n = layer_.qkv.n;
        const int64_t narrow_width = std::max({2 * hidden_, padded(layer_.qkv.k), padded(q_width_), padded(hidden_)});
        embedded_ = room_for<float>(rows * hidden_);
        stream_ = room_for<float>(rows * hidden_);
        left_[0] = room_for<float>(a.count * hidden_);
        left_[1] = room_for<float>(a.count * hidden_);
        spare_ = room_for<float>(a.count * hidden_);
        qkv_ = room_for<float>(rows * n);
        mixed_ = room_for<float>(rows * q_width_);
        logits_ = room_for<float>(int64_t(a.count) * a.head.out.n);
        narrow_ = room_for<bf16>(rows * narrow_width);
        second_ = room_for<bf16>(rows * narrow_width);
        gated_ = room_for<bf16>(int64_t(a.count) * padded(layer_.down.k));
        states_ = a.states;
        best_.resize(size_t(a.count) * a.threads);
        begin_step();
    }

    void run(const Member& me) {
        while (true) {
            enter(me);
            attention_.run(me);
            me.wait();
            const int rows = int(live_.size());
            float* left = left_[step_ & 1].get();
            leave(layer_, rows, mixed_.get(), stream_at_, keep_.data(), narrow_.get(), gated_.get(), spare_.get(), left, me);
            me.wait();
            answer(left, rows, me);
            me.wait();
            if (me.thread == 0) next(left, me.team);
            me.wait();
            if (live_.empty()) return;
        }
    }

  private:
    int64_t rows_of() const { return int64_t(tokens_.size()); }

    void add_row(const Drafted& d, int64_t token, int position, uint32_t seen) {
        const int page = a_.shape.page, row = 2 * layer_.head_dim;
        tokens_.push_back(token);
        low_.push_back(0);
        seen_.push_back(seen);
        where_.push_back(int64_t(a_.tables[d.table + position / page]) * page + position % page);
        const float* turns = a_.rope + int64_t(position) * row;
        rope_.insert(rope_.end(), turns, turns + row);
    }

    // The rows are there: attention of this step, and the stream it adds to.
    void begin_step() {
        const int page = a_.shape.page;
        for (Span& span : spans_) span.last = (span.start + span.rows - 1) / page + 1;
        attention_.begin({&a_.shape, spans_.data(), a_.tables, low_.data(), seen_.data(), qkv_.get(), layer_.qkv.n, a_.k,
                          a_.v, mixed_.get()},
                         int(spans_.size()), a_.threads);
        stream_at_ = a_.head.project.n ? stream_.get() : states_;
    }

    // From tokens and states to q, and to K and V in their pages.
    void enter(const Member& me) {
        const Head& head = a_.head;
        const int64_t rows = rows_of(), row_width = layer_.qkv.n;
        int64_t first, last;
        me.share(rows, first, last);
        for (int64_t r = first; r < last; ++r) {
            const bf16* from = head.embed + tokens_[r] * hidden_;
            float* to = embedded_.get() + r * hidden_;
#pragma omp simd
            for (int i = 0; i < hidden_; ++i) to[i] = wide(from[i]) * head.embed_scale;
        }
        const float* both[2] = {embedded_.get(), states_};
        join(head.entrance, rows, both, narrow_.get(), me);  // each thread its own rows
        me.wait();
        const bf16* read = narrow_.get();
        if (head.project.n) {
            multiply(head.project, rows, read, true, stream_.get(), me);
            me.wait();
            const float* stream = stream_.get();
            join(head.first, rows, &stream, second_.get(), me);
            me.wait();
            read = second_.get();
        }
        multiply(layer_.qkv, rows, read, true, qkv_.get(), me);
        me.wait();
        const int64_t stride = 2 * layer_.head_dim;
        turn(layer_, rows, rope_.data(), rope_.data() + layer_.head_dim, stride, qkv_.get(), me);
        me.wait();
        const float *k = qkv_.get() + q_width_ + first * row_width, *v = k + int64_t(layer_.kv_heads) * layer_.head_dim;
        write_kv(layer_.kv_heads, a_.shape.page, layer_.head_dim, last - first, where_.data() + first, k, v, row_width, a_.k,
                 a_.v);
        me.wait();
    }

    // Logits of the streams ``left`` [rows, H], and what each thread finds best in its share of them.
    void answer(const float* left, int rows, const Member& me) {
        const Head& head = a_.head;
        const Join final{{head.final_gain}, layer_.eps, 1, hidden_, 0};
        join(final, rows, &left, narrow_.get(), me);
        me.wait();
        multiply(head.out, rows, narrow_.get(), head.out.bits != 16, logits_.get(), me);
        me.wait();
        int64_t first, last;
        me.share(head.out.n, first, last);
        for (int r = 0; r < rows; ++r)
            best_[size_t(r) * a_.threads + me.thread] = best_of(logits_.get() + int64_t(r) * head.out.n, first, last, a_.confidence > 0);
    }

    // Takes the best tokens; the sequences that go on are the rows of the next step.
    void next(float* left, int team) {
        std::vector<int> live;
        spans_.clear(), tokens_.clear(), low_.clear(), seen_.clear(), where_.clear(), rope_.clear(), keep_.clear();
        for (size_t row = 0; row < live_.size(); ++row) {
            const int i = live_[row];
            const Drafted& d = a_.drafted[i];
            int64_t token;
            if (!taken(&best_[row * a_.threads], team, chance_[i], token)) continue;
            a_.out[int64_t(i) * a_.most + a_.lengths[i]++] = token;
            if (a_.lengths[i] >= d.room || chance_[i] < a_.confidence) continue;
            const int position = d.start + d.fed + a_.lengths[i] - 1, at = int(live.size());
            spans_.push_back({at, 1, position, 0, 0, d.table});
            keep_.push_back(at);
            add_row(d, token, position, 1);
            if (at != int(row)) std::copy_n(left + row * hidden_, hidden_, left + int64_t(at) * hidden_);
            live.push_back(i);
        }
        live_ = live;
        states_ = left;
        ++step_;
        if (!live_.empty()) begin_step();
    }

    // Joins what the threads found of one row; false where no token can be chosen. ``chance`` becomes that of all so far.
    bool taken(const Best* found, int team, double& chance, int64_t& token) const {
        Best best;
        bool nan = false;
        for (int t = 0; t < team; ++t) {
            nan |= found[t].nan;
            if (found[t].peak > best.peak) best = found[t];
        }
        if (nan || !std::isfinite(best.peak)) return false;
        token = a_.head.ids ? a_.head.ids[best.place] : best.place;
        if (a_.confidence > 0) {
            float sum = 0.0f;
            for (int t = 0; t < team; ++t) sum += found[t].sum * fast_exp(found[t].peak - best.peak);
            chance /= sum;
        }
        return true;
    }

    const Arguments& a_;
    const Layer& layer_;
    const int hidden_, q_width_;
    int step_ = 0;
    std::vector<int> live_;  // sequences that still draft: rows of the answers
    std::vector<Span> spans_;
    std::vector<int64_t> tokens_, where_, keep_;
    std::vector<int32_t> low_;
    std::vector<uint32_t> seen_;
    std::vector<float> rope_;
    std::vector<double> chance_;
    std::vector<Best> best_;
    Attention attention_;
    const float *states_ = nullptr, *stream_at_ = nullptr;
    std::unique_ptr<float[]> embedded_, stream_, left_[2], spare_, qkv_, mixed_, logits_;
    std::unique_ptr<bf16[]> narrow_, second_, gated_;
};

}  // namespace

extern "C" {

// Drafts for ``count`` sequences. ``tokens`` and ``states`` [R, H]: the rows fed first, all sequences in order; ``tables``
// their page ids; ``rope`` [L, 2, D] by position; ``k``, ``v`` bfloat16 [N, Hkv, P, D]. A chain ends behind a token that
// the head gives, with all before it, less than ``confidence``. ``out`` [count, most] gets ``lengths[i]`` tokens each.
void draft_chain(const Head* head, const Shape* shape, const Drafted* drafted, int count, const int64_t* tokens,
                 const float* states, const int32_t* tables, const float* rope, bf16* k, bf16* v, double confidence,
                 int most, int64_t* out, int32_t* lengths, int threads) {
    const Arguments arguments{*head, *shape, drafted, count, tokens, states, tables, rope, k, v, confidence, most, out, lengths, threads};
    Chain chain(arguments);
    together(threads, [&](const Member& me) { chain.run(me); });
}
}
