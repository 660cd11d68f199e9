// What the binding passes: plain structures, mirrored field by field in structs.py.
#pragma once
#include "panels.h"

extern "C" {

// Weights [n, k] in panels; ``bias`` float32 [n] or null. ``bits`` is 16, or the width of codes in groups of
// ``group`` inputs (see coded_panels.h). Sums are rounded to bfloat16 behind a bias at 16 bits, before it at fewer.
struct Linear {
    const bf16* panels;
    const float* bias;
    int32_t n, k, bits, group;
};

// Attention of one KV group: sizes, and the soft-cap of scores (0: none).
struct Shape {
    int32_t heads, kv_heads, head_dim, page;
    float soft_cap;
    int32_t spare;
};

// Rows of several parts of ``width`` floats side by side, each normed by its gain, or as it is where that is null.
struct Join {
    const float* gains[4];
    float eps;
    int32_t parts, width, spare;
};

struct Layer {
    Linear qkv, o, gate_up, down;  // gate_up: panels of gate and up columns take turns, n = 2 * inner
    const float *attn_gain, *mlp_gain;
    const float *qk_gain, *attn_out_gain, *mlp_out_gain;  // null where the family has none
    float eps, query_scale;
    int32_t hidden, heads, kv_heads, head_dim, activation, spare;
};

// A draft head of one layer. Row s is token x_s beside the state of the position before; ``entrance`` joins both. With
// ``project`` (n > 0) that becomes the stream, of which q, k and v read ``first``; else they read it as it is, and the
// state is the stream. ``ids``: the token of each row of ``out``, or null for all in order; ``final_gain`` or null.
struct Head {
    Linear project, out;
    Join entrance, first;
    const Layer* layer;
    const bf16* embed;
    const float* final_gain;
    const int64_t* ids;
    float embed_scale;
    int32_t spare;
};
}
