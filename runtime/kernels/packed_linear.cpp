#include "packed_linear.h"

#include <algorithm>

namespace kvgraph {

PackedLinear::PackedLinear(const Attributes& attributes)
    : in_features_(attributes.integer("in_features")),
      product_(attributes, "", in_features_, attributes.integer("out_features"),
               parse_activation(attributes.text("gate")), parse_activation(attributes.text("activation"))) {}

void PackedLinear::run(const Call& call) const {
    const Tensor input = call.input(0), weights = call.input(1), bias = call.input(2),
                 residual = call.input(3);
    if (input.shape.empty() || input.shape.back() != in_features_)
        throw std::invalid_argument("input is not as wide as in_features");
    if (weights.shape.size() != 1 || weights.shape[0] != product_.weight_bytes())
        throw std::invalid_argument("weights are not as long as their shape and format say");
    std::vector<int64_t> shape = input.shape;
    shape.back() = product_.width();
    PackedProduct::Operands operands{};
    operands.rows = input.rows();
    operands.weights = weights.as<uint8_t>();
    operands.bias = bias.as<float>();
    operands.residual = residual.as<float>();
    operands.output = static_cast<float*>(call.output(0, shape));
    if (operands.rows == 0) return;
    if (operands.residual != nullptr && residual.shape != shape)
        throw std::invalid_argument("residual has another shape than the result");
    thread_local Scratch scratch;
    product_.arrange(call, scratch, input.as<float>(), nullptr, &operands, 1);
    const int64_t units = product_.units(), share = product_.share(units);
    call.parallel(static_cast<size_t>((units + share - 1) / share), [&](size_t task) {
        const int64_t begin = static_cast<int64_t>(task) * share;
        product_.multiply(operands, begin, std::min(units, begin + share));
    });
}

}  // namespace kvgraph
