// Integer codes of canonical matrices to the panels that the kernels read.
#include <algorithm>

#include "weight_kernels.h"

namespace kvgraph {

// Lays out outputs `start` to `stop` of codes of `inputs` inputs: every 16 of them a panel of blocks of 32
// inputs, whose bytes begin `panel_bytes` and `block_bytes` apart.
KVGRAPH_CALLABLE void kvgraph_pack_panels(const uint8_t* codes, int64_t pitch, int32_t halves,
                                          int32_t transposed, int32_t flip, int32_t fill, int64_t inputs,
                                          int64_t start, int64_t stop, uint8_t* panels, int64_t panel_bytes,
                                          int64_t block_bytes) {
    const WeightKernels& loops = weight_kernels();
    const StoredCodes stored{
        codes, pitch, halves != 0, transposed != 0, static_cast<uint8_t>(flip), static_cast<uint8_t>(fill)};
    for (int64_t input = 0; input < inputs; input += 32, panels += block_bytes) {
        uint8_t* block = panels;
        for (int64_t output = start; output < stop; output += 16, block += panel_bytes) {
            const int64_t height = std::min<int64_t>(32, inputs - input),
                          width = std::min<int64_t>(16, stop - output);
            loops.pack_block(stored, input, height, output, width, block);
        }
    }
}

}  // namespace kvgraph
