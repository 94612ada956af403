// What a call of CachedAttention is given.
#pragma once

#include "kernels.h"
#include "operator.h"

namespace kvgraph {

struct AttentionOperands {
    int64_t batch, tokens, capacity;  // B, S, T
    CacheType type;
    int64_t bytes;                        // of an element of the cache
    const float* qkv;                     // [B, S, (H + 2 K) * D]
    const int64_t* past;                  // [B]
    const float *cos, *sin;               // [B, S, R / 2]
    const float *q_norm, *k_norm;         // [D]
    const float *key_cos, *key_sin;       // [T, R / 2]
    const float *key_scale, *key_offset;  // [K, D]
    const float *value_scale, *value_offset;
    bool forms_keys;      // scales and offsets of keys are applied to keys, not to queries
    char *keys, *values;  // [B, K, T, D]
    float* queries;       // [B, S, H, D]: normed, rotated, times the scales
    float* output;        // [B, S, H * D]

    const CacheKernels& cache() const { return kernels().caches[static_cast<int>(type)]; }
};

// Reads and checks the inputs, and makes the outputs; `queries` are still to be made.
AttentionOperands read_operands(const Call& call, int64_t heads, int64_t kv_heads, int64_t size,
                                int64_t rotary, bool capped);

}  // namespace kvgraph
