// CachedAttention: heads are normed and rotated, new keys and values are written to the cache, queries read
// it.
#pragma once

#include "attention.h"
#include "operator.h"

namespace kvgraph {

class CachedAttention {
  public:
    explicit CachedAttention(const Attributes& attributes);
    void run(const Call& call) const;

    static constexpr const char* kName = "CachedAttention";
    static constexpr int kInputs[] = {kFloat, kInt64, kFloat, kFloat, kFloat, kFloat, kFloat, kFloat};
    static constexpr int kOutputs[] = {kFloat, kFloat, kFloat};
    static constexpr size_t kRequiredInputs = 4;

  private:
    struct Operands;
    void write(const Operands& operands, int64_t row) const;
    void place(const float* from, const float* norm, const Operands& operands, int64_t row, float scale,
               float* to) const;
    void one_position(const Call& call, const Operands& operands) const;
    void many_positions(const Call& call, const Operands& operands) const;
    void tile(const Operands& operands, int64_t row, int64_t head, int64_t begin) const;

    int64_t heads_, kv_heads_, size_, window_, rotary_;
    float scale_, softcap_, epsilon_;
    bool interleaved_;
};

}  // namespace kvgraph
