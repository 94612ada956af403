// PackedLinear: act(x W + bias) + residual, or act(gate) * up + residual, with W in panels of 16 columns.
#pragma once

#include "kernels.h"
#include "operator.h"

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
    struct Operands;
    void arrange(const Call& call, Operands& operands) const;
    void split(const Call& call, Operands& operands) const;
    void panels(const Operands& operands, int64_t begin, int64_t end) const;
    void split_panels(const Operands& operands, int64_t begin, int64_t end) const;
    void integer_panel(const Operands&, int64_t top, int64_t bottom, const uint8_t* panel, float* tile) const;
    void float_panel(const Operands&, int64_t top, int64_t bottom, const uint8_t* panel, float* tile) const;
    void finish(const Operands& operands, int64_t unit, int64_t row, float* tile, float* up) const;

    int64_t in_features_, out_features_;
    Packing packing_;
    enum { kNotRounded, kBlocks, kToken, kStatic } input_;
    float input_scale_ = 0;
    Activation gate_, activation_;
    int64_t width_;  // columns of the result
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
