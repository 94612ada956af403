// PackedGather: columns of a packed matrix by number, the rows of an embedding table that is stored as its
// tied head.
#include <string>

#include "packed_linear.h"

namespace kvgraph {

PackedGather::PackedGather(const Attributes& attributes)
    : in_features_(attributes.integer("in_features")),
      out_features_(attributes.integer("out_features")),
      packing_(parse_packing(attributes.text("format"), attributes.text("scale_format"))) {}

void PackedGather::run(const Call& call) const {
    const Tensor weights = call.input(0), ids = call.input(1);
    std::vector<int64_t> shape = ids.shape;
    shape.push_back(in_features_);
    int64_t count = 1;
    for (const int64_t size : ids.shape) count *= size;
    auto* output = static_cast<float*>(call.output(0, shape));
    const int64_t panel_bytes = packing_.panel_bytes(in_features_);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t id = ids.as<int64_t>()[i];
        if (id < 0 || id >= out_features_) {
            throw std::invalid_argument("token id " + std::to_string(id) + " is outside of the table");
        }
        kernels().gather(packing_, weights.as<uint8_t>() + id / kPanel * panel_bytes,
                         static_cast<int>(id % kPanel), in_features_, output + i * in_features_);
    }
}

}  // namespace kvgraph
