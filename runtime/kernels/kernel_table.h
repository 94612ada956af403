// The table of the including file, which has set its target and defined `integer_rows`, `kIntegerRows`,
// `kFloatRows` and what attention_kernels.h and float_kernels.h ask for.
#pragma once

#include "attention_kernels.h"
#include "float_kernels.h"
#include "kernels.h"

namespace kvgraph {
namespace {

// From a count of rows known when it runs to one known when it is compiled.
template <int rows>
void integer_tile(const Packing& packing, const Rounded& input, int64_t first, int count,
                  const uint8_t* panel, float* tile) {
    if (count == rows) return integer_rows<rows>(packing, input, first, panel, tile);
    if constexpr (rows > 1) integer_tile<rows - 1>(packing, input, first, count, panel, tile);
}

// Constant, so that no code of the target runs on a processor that lacks it when the library is loaded.
constexpr Kernels kernel_table(const char* name) {
    return {name,
            kIntegerRows,
            kFloatRows,
            0,
            integer_tile<kIntegerRows>,
            float_tile<kFloatRows>,
            round_blocks,
            round_row,
            gather,
            finish,
            {cache_kernels<Float32Element>(), cache_kernels<Float16Element>(), cache_kernels<Int8Element>(),
             cache_kernels<Float8Element>()},
            nullptr};
}

}  // namespace
}  // namespace kvgraph
