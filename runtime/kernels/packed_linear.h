// PackedLinear: act(x W + bias) + residual, or act(gate) * up + residual, with W in panels of 16 columns.
#pragma once

#include "packed_product.h"

namespace kvgraph {

class PackedLinear {
  public:
    explicit PackedLinear(const Attributes& attributes);
    void run(const Call& call) const;

    static constexpr const char* kName = "PackedLinear";
    static constexpr int kInputs[] = {kFloat, kUint8, kFloat, kFloat};
    static constexpr int kOutputs[] = {kFloat};
    static constexpr size_t kRequiredInputs = 2;

  private:
    int64_t in_features_;
    PackedProduct product_;
};

class PackedGather {
  public:
    explicit PackedGather(const Attributes& attributes);
    void run(const Call& call) const;

    static constexpr const char* kName = "PackedGather";
    static constexpr int kInputs[] = {kUint8, kInt64};
    static constexpr int kOutputs[] = {kFloat};
    static constexpr size_t kRequiredInputs = 2;

  private:
    int64_t in_features_, out_features_;
    Packing packing_;
};

}  // namespace kvgraph
