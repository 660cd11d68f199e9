// Parts of a layer, each the work of a team: a call of the binding is one or more of them with waits between.
#pragma once
#include "layer.h"
#include "team.h"

static inline int padded(int k) { return (k + 1) & ~1; }

// A row normed by its gain; without one it is rounded as it is.
void norm(const float* x, const float* gain, float eps, int width, float* out);
void norm_to_bf16(const float* x, const float* gain, float eps, int width, bf16* out);

// out bfloat16 [rows, padded parts * width] of ``parts[p]`` [rows, width]. A row is its thread's from first to last.
void join(const Join& join, int64_t rows, const float* const* parts, bf16* out, const Member& me);

// y float32 [rows, n] = x bfloat16 [rows, padded k] @ W.T (+ bias); ``settled``: rounded as a layer goes on with it.
void multiply(const Linear& linear, int64_t rows, const bf16* x, bool settled, float* y, const Member& me);

// Turns (and norms, where the family does) q and k of ``qkv`` [rows, Hq + 2 Hkv, D].
void turn(const Layer& layer, int64_t rows, const float* cosine, const float* sine, int64_t rope_stride, float* qkv,
          const Member& me);

// The way out of attention; arguments as of ``layer_out``.
void leave(const Layer& layer, int64_t rows, const float* mixed, const float* hidden, const int64_t* keep,
           bf16* narrow_in, bf16* gated, float* spare, float* out, const Member& me);
