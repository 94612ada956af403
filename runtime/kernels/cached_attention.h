// CachedAttention: heads are normed and rotated, new keys and values are written to the cache, queries read
// it. A cache of floats holds keys and values; one of 8-bit codes is (entry - offset) / scale, rounded, with
// a scale and an offset for each channel of a head. Where key_cos and key_sin are given, keys are kept
// without their rotary embedding, and get it when they are read.
//
// Inputs: qkv [B, S, (H + 2 K) * D], past_length [B], past_key and past_value [B, K, T, D], cos and sin
// [B, S, R / 2], q_norm and k_norm [D], key_cos and key_sin [1, T, R / 2], key_scale, key_offset, value_scale
// and value_offset [K, D].
#pragma once

#include "attention.h"
#include "operator.h"

namespace kvgraph {

struct AttentionOperands;

class CachedAttention {
  public:
    explicit CachedAttention(const Attributes& attributes);
    void run(const Call& call) const;

  private:
    void write(const AttentionOperands& operands, int64_t row) const;
    void place(const float* from, const float* norm, const AttentionOperands& operands, int64_t row,
               bool turn, float scale, float* to) const;
    KeyForm key_form(const AttentionOperands& operands, int64_t kv_head) const;
    void deliver(const AttentionOperands& operands, int64_t head, const float* from, float* to) const;
    void one_position(const Call& call, const AttentionOperands& operands) const;
    void many_positions(const Call& call, const AttentionOperands& operands) const;
    void tile(const AttentionOperands& operands, int64_t row, int64_t head, int64_t begin) const;

    int64_t heads_, kv_heads_, size_, window_, rotary_;
    float scale_, softcap_, epsilon_;
    bool interleaved_;
};

// The same over a cache of one type: ONNX Runtime has an operator for each.
template <int type>
class CachedAttentionOf : public CachedAttention {
  public:
    using CachedAttention::CachedAttention;
    static constexpr const char* kName = "CachedAttention";
    static constexpr int kInputs[] = {kFloat, kInt64, type,   type,   kFloat, kFloat, kFloat,
                                      kFloat, kFloat, kFloat, kFloat, kFloat, kFloat, kFloat};
    static constexpr int kOutputs[] = {kFloat, type, type};
    static constexpr size_t kRequiredInputs = 4;
};

}  // namespace kvgraph
