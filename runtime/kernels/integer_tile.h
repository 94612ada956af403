// From a count of rows known when it runs to one known when it is compiled; `integer_rows` is the including
// file's.
#pragma once

#include "kernels.h"

namespace kvgraph {
namespace {

template <int rows>
void integer_tile(const Packing& packing, const Rounded& input, int64_t first, int count,
                  const uint8_t* panel, float* tile) {
    if (count == rows) return integer_rows<rows>(packing, input, first, panel, tile);
    if constexpr (rows > 1) integer_tile<rows - 1>(packing, input, first, count, panel, tile);
}

}  // namespace
}  // namespace kvgraph
