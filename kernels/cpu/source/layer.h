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

struct Layer {
    Linear qkv, o, gate_up, down;  // gate_up: panels of gate and up columns take turns, n = 2 * inner
    const float *attn_gain, *mlp_gain;
    const float *qk_gain, *attn_out_gain, *mlp_out_gain;  // null where the family has none
    float eps, query_scale;
    int32_t hidden, heads, kv_heads, head_dim, activation, spare;
};
}
