// A barrier of one parallel region that soon gives its core away.
//
// The waits between the phases of a layer are short, so a thread looks for a while, then it sleeps: it never keeps the
// core from a member of the team that the machine has interrupted, as OpenMP's own barrier does while its threads
// wait actively, and it does not sleep at once, as that one does while they wait passively.
#pragma once
#include <omp.h>

#include <atomic>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

class Barrier {
  public:
    // Returns when all ``team`` threads have come.
    void wait(int team) {
        const int seen = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == team) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(seen + 1, std::memory_order_release);
            phase_.notify_all();
            return;
        }
        for (int looks = 0; looks < 500; ++looks) {
            if (phase_.load(std::memory_order_acquire) != seen) return;
#if defined(__x86_64__)
            _mm_pause();
#endif
        }
        phase_.wait(seen, std::memory_order_acquire);
    }

  private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> phase_{0};
};

// A thread at work with others on one thing.
struct Member {
    int thread, team;
    Barrier& barrier;

    void wait() const { barrier.wait(team); }

    // Its share [first, last) of n things.
    void share(int64_t n, int64_t& first, int64_t& last) const {
        first = n * thread / team;
        last = n * (thread + 1) / team;
    }
};

// Runs ``work(me)`` as a team of so many threads, or as many as there are.
template <class Work>
void together(int threads, Work work) {
    Barrier barrier;
#pragma omp parallel num_threads(threads)
    work(Member{omp_get_thread_num(), omp_get_num_threads(), barrier});
}
