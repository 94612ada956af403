// PackedExperts: for every token the sum of (act(x G) * (x U)) D over the experts that it chose, each times
// its weight; G, U and D of all experts are in panels of 16 columns, one expert's behind another's.
#pragma once

#include <vector>

#include "packed_product.h"

namespace kvgraph {

class PackedExperts {
  public:
    explicit PackedExperts(const Attributes& attributes);
    void run(const Call& call) const;

    static constexpr const char* kName = "PackedExperts";
    // x, chosen, their weights, gates and ups, downs, residual.
    static constexpr int kInputs[] = {kFloat, kInt64, kFloat, kUint8, kUint8, kFloat};
    static constexpr int kOutputs[] = {kFloat};
    static constexpr size_t kRequiredInputs = 5;

  private:
    struct Step;
    struct Choices;
    void check(const Call& call) const;
    void sort(const Step& step, Choices& choices) const;
    void multiply(const Call& call, const PackedProduct& product, const uint8_t* weights, const float* input,
                  const int64_t* order, const Choices& choices, float* output) const;
    void add(const Call& call, const Step& step, const Choices& choices, const float* outputs) const;

    int64_t num_experts_, hidden_size_, intermediate_size_;
    PackedProduct gate_up_, down_;
};

}  // namespace kvgraph
