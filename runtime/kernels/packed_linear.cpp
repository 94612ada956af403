#include "packed_linear.h"

#include <algorithm>
#include <cstring>

namespace kvgraph {

namespace {
// Rows of the input that pass one panel after another, and how much of the input they may be.
constexpr int64_t kStripRows = 128, kStripBytes = 1 << 20;
static_assert(kStripRows >= kMaxRows);
// From so many rows on, parts of floats are multiplied faster than floats; rows of weights that pass a strip
// of the input before the next ones, which stay in the first-level cache.
constexpr int64_t kManyRows = 9, kSliceRows = 512;
}  // namespace

struct PackedLinear::Operands {
    const float* input;
    Rounded rounded;
    const uint16_t* parts;  // by tile, see SplitProduct; null where floats are multiplied as they are
    int64_t rows;
    const uint8_t* weights;
    const float* bias;
    const float* residual;
    float* output;
};

PackedLinear::PackedLinear(const Attributes& attributes)
    : in_features_(attributes.integer("in_features")),
      out_features_(attributes.integer("out_features")),
      packing_(parse_packing(attributes.text("format"), attributes.text("scale_format"))),
      gate_(parse_activation(attributes.text("gate"))),
      activation_(parse_activation(attributes.text("activation"))) {
    const std::string input = attributes.text("input");
    input_ = input == "float"   ? kNotRounded
             : input == "block" ? kBlocks
             : input == "token" ? kToken
                                : kStatic;
    if (input_ == kStatic) {
        input_scale_ = attributes.number("input_scale");
        if (input != "static" || !(input_scale_ > 0))
            throw std::invalid_argument("input " + input + " is malformed");
    }
    const bool floats = packing_.format <= Format::kBFloat16;
    if (floats != (input_ == kNotRounded) || (input_ >= kToken && packing_.format != Format::kInt8)) {
        throw std::invalid_argument("input " + input + " does not suit the format of the weights");
    }
    width_ = gate_ == kNone ? out_features_ : out_features_ / 2;
}

// The input as the kernels take it: rounded, or the rows of each tile together.
void PackedLinear::arrange(const Call& call, Operands& operands) const {
    const int64_t blocks = (in_features_ + kBlock - 1) / kBlock, padded = blocks * kBlock,
                  rows = operands.rows;
    const bool floats = input_ == kNotRounded, whole = !floats && input_ != kBlocks;
    if (floats && rows == 1) return;
    if (floats && rows >= kManyRows && kernels().split != nullptr) return split(call, operands);
    const int64_t scales = whole ? 1 : blocks, tile = floats ? kernels().float_rows : kernels().rows;
    thread_local Scratch scratch;
    const size_t value_bytes = static_cast<size_t>(rows * padded) * (floats ? sizeof(float) : 1);
    const size_t scale_bytes = static_cast<size_t>(rows * scales) * sizeof(float);
    char* memory =
        static_cast<char*>(scratch.reserve(value_bytes + 2 * scale_bytes + static_cast<size_t>(rows) + 512));
    auto* factors = reinterpret_cast<float*>(memory + value_bytes);
    auto* sums = reinterpret_cast<int32_t*>(memory + value_bytes + scale_bytes);
    auto* minimum = reinterpret_cast<bool*>(memory + value_bytes + 2 * scale_bytes);
    call.parallel(static_cast<size_t>((rows + tile - 1) / tile), [&](size_t task) {
        const int64_t first = static_cast<int64_t>(task) * tile;
        const int count = static_cast<int>(std::min(tile, rows - first));
        for (int r = 0; r < count; ++r) {
            const float* from = operands.input + (first + r) * in_features_;
            if (floats) {
                auto* to = reinterpret_cast<float*>(memory) + first * in_features_ + r;
                for (int64_t k = 0; k < in_features_; ++k) to[k * count] = from[k];
                continue;
            }
            auto* to = reinterpret_cast<int8_t*>(memory) + first * padded + r * kBlock;
            float* scale = factors + first * scales + r;
            int32_t* sum = sums + first * scales + r;
            minimum[first + r] =
                whole ? kernels().round_row(from, in_features_, input_scale_, count, to, scale, sum)
                      : kernels().round_blocks(from, in_features_, count, to, scale, sum);
        }
    });
    if (floats) {
        operands.input = reinterpret_cast<float*>(memory);
        return;
    }
    const bool has_minimum = std::any_of(minimum, minimum + rows, [](bool found) { return found; });
    operands.rounded = {reinterpret_cast<int8_t*>(memory), factors, sums, blocks, whole, has_minimum};
}

void PackedLinear::split(const Call& call, Operands& operands) const {
    const int64_t blocks = (in_features_ + kBlock - 1) / kBlock,
                  tile = blocks * kSplitParts * kSplitRows * kBlock;
    const int64_t tiles = (operands.rows + kSplitRows - 1) / kSplitRows;
    thread_local Scratch scratch;
    auto* parts =
        static_cast<uint16_t*>(scratch.reserve(static_cast<size_t>(tiles * tile) * sizeof(uint16_t)));
    call.parallel(static_cast<size_t>(tiles), [&](size_t task) {
        const int64_t first = static_cast<int64_t>(task) * kSplitRows;
        for (int64_t row = first; row < std::min(operands.rows, first + kSplitRows); ++row) {
            kernels().split->row(operands.input + row * in_features_, in_features_,
                                 parts + first / kSplitRows * tile + (row - first) * kBlock);
        }
    });
    operands.parts = parts;
}

void PackedLinear::run(const Call& call) const {
    const Tensor input = call.input(0), weights = call.input(1), bias = call.input(2),
                 residual = call.input(3);
    const int64_t units = (width_ + kPanel - 1) / kPanel, panels_a_unit = gate_ == kNone ? 1 : 2;
    const int64_t bytes = units * panels_a_unit * packing_.panel_bytes(in_features_);
    if (input.shape.empty() || input.shape.back() != in_features_)
        throw std::invalid_argument("input is not as wide as in_features");
    if (weights.shape.size() != 1 || weights.shape[0] != bytes)
        throw std::invalid_argument("weights are not as long as their shape and format say");
    std::vector<int64_t> shape = input.shape;
    shape.back() = width_;
    Operands operands{input.as<float>(),
                      {},
                      nullptr,
                      input.rows(),
                      weights.as<uint8_t>(),
                      bias.as<float>(),
                      residual.as<float>(),
                      static_cast<float*>(call.output(0, shape))};
    if (operands.rows == 0) return;
    if (operands.residual != nullptr && residual.shape != shape)
        throw std::invalid_argument("residual has another shape than the result");
    arrange(call, operands);
    // A share is large enough to be worth a thread's waking, and there are enough of them that none waits
    // long at the end. The panels of a share stay in the second-level cache while every row of the input
    // passes them.
    const int64_t unit_bytes = bytes / units;
    const int64_t share = std::clamp<int64_t>(units / 16, std::max<int64_t>(1, 32768 / unit_bytes),
                                              std::max<int64_t>(1, 786432 / unit_bytes));
    call.parallel(static_cast<size_t>((units + share - 1) / share), [&](size_t task) {
        const int64_t begin = static_cast<int64_t>(task) * share;
        const int64_t end = std::min(units, begin + share);
        operands.parts == nullptr ? panels(operands, begin, end) : split_panels(operands, begin, end);
    });
}

// Units begin ... end - 1, a unit being a panel, or two where one is the gate of the other.
void PackedLinear::panels(const Operands& operands, int64_t begin, int64_t end) const {
    const int64_t step = input_ == kNotRounded ? kernels().float_rows : kernels().rows;
    const int64_t panel_bytes = packing_.panel_bytes(in_features_);
    const int parts = gate_ == kNone ? 1 : 2;
    // So many rows that what they need of the input stays in the second-level cache too.
    const int64_t row_bytes = in_features_ * (input_ == kNotRounded ? 4 : 1);
    const int64_t strip = std::clamp<int64_t>(kStripBytes / row_bytes / step, 1, kStripRows / step) * step;
    alignas(64) float tiles[2][kStripRows * kPanel];
    for (int64_t top = 0; top < operands.rows; top += strip) {
        const int64_t bottom = std::min(operands.rows, top + strip);
        for (int64_t unit = begin; unit < end; ++unit) {
            for (int part = 0; part < parts; ++part) {
                const uint8_t* panel = operands.weights + (unit * parts + part) * panel_bytes;
                if (input_ == kNotRounded)
                    float_panel(operands, top, bottom, panel, tiles[part]);
                else
                    integer_panel(operands, top, bottom, panel, tiles[part]);
            }
            for (int64_t row = top; row < bottom; ++row) {
                finish(operands, unit, row, tiles[0] + (row - top) * kPanel, tiles[1] + (row - top) * kPanel);
            }
        }
    }
}

// The same from parts of floats. A slice of each panel passes all rows of a strip, and adds to their tiles.
void PackedLinear::split_panels(const Operands& operands, int64_t begin, int64_t end) const {
    const int64_t a_unit = gate_ == kNone ? 1 : 2, panels = (end - begin) * a_unit;
    const int64_t panel_bytes = packing_.panel_bytes(in_features_), line = panel_bytes / in_features_;
    const int64_t blocks = (in_features_ + kBlock - 1) / kBlock, a_block = kSplitParts * kSplitRows * kBlock;
    const int parts = split_parts(packing_.format);
    const int64_t panel_tile = kStripRows * kPanel, slice_numbers = kSliceRows * kPanel * parts;
    thread_local Scratch scratch;
    auto* tiles =
        static_cast<float*>(scratch.reserve(static_cast<size_t>(panels * panel_tile) * sizeof(float) +
                                            static_cast<size_t>(2 * slice_numbers) * sizeof(uint16_t)));
    auto* weights = reinterpret_cast<uint16_t*>(tiles + panels * panel_tile);
    for (int64_t top = 0; top < operands.rows; top += kStripRows) {
        const int64_t bottom = std::min(operands.rows, top + kStripRows);
        for (int64_t k = 0; k < in_features_; k += kSliceRows) {
            const int64_t depth = std::min(kSliceRows, in_features_ - k);
            for (int64_t panel = 0; panel < panels; panel += 2) {
                const int64_t count = std::min<int64_t>(2, panels - panel);
                for (int64_t i = 0; i < count; ++i) {
                    kernels().split->panel(
                        packing_.format,
                        operands.weights + (begin * a_unit + panel + i) * panel_bytes + k * line, depth,
                        weights + i * slice_numbers);
                }
                for (int64_t row = top; row < bottom; row += 2 * kSplitRows) {
                    const int64_t first = row / kSplitRows * blocks + k / kBlock;
                    kernels().split->multiply({operands.parts + first * a_block, blocks * a_block, weights,
                                               slice_numbers, (depth + kBlock - 1) / kBlock, parts,
                                               bottom - row > kSplitRows ? 2 : 1, static_cast<int>(count),
                                               k > 0, tiles + panel * panel_tile + (row - top) * kPanel,
                                               panel_tile});
                }
            }
        }
        for (int64_t unit = begin; unit < end; ++unit) {
            float* tile = tiles + (unit - begin) * a_unit * panel_tile;
            for (int64_t row = top; row < bottom; ++row, tile += kPanel) {
                finish(operands, unit, row, tile, tile + panel_tile);
            }
        }
    }
}

// The rows top ... bottom - 1 times one panel.
void PackedLinear::integer_panel(const Operands& operands, int64_t top, int64_t bottom, const uint8_t* panel,
                                 float* tile) const {
    for (int64_t row = top; row < bottom; row += kernels().rows) {
        const int count = static_cast<int>(std::min<int64_t>(kernels().rows, bottom - row));
        kernels().integer_tile(packing_, operands.rounded, row, count, panel, tile + (row - top) * kPanel);
    }
}

// The same in slices of in_features, whose weights stay in the first-level cache while the rows pass.
void PackedLinear::float_panel(const Operands& operands, int64_t top, int64_t bottom, const uint8_t* panel,
                               float* tile) const {
    const int64_t step = kernels().float_rows, line = packing_.format == Format::kFloat32 ? 64 : 32;
    const int64_t slice = bottom - top <= step ? in_features_ : 256;
    for (int64_t k = 0; k < in_features_; k += slice) {
        const int64_t depth = std::min(slice, in_features_ - k);
        for (int64_t row = top; row < bottom; row += step) {
            const int count = static_cast<int>(std::min(step, bottom - row));
            kernels().float_tile(packing_.format, operands.input + row * in_features_ + k * count, depth,
                                 count, panel + k * line, k > 0, tile + (row - top) * kPanel);
        }
    }
}

// One row of a unit: bias, activation, residual, and the columns that are not padding.
void PackedLinear::finish(const Operands& operands, int64_t unit, int64_t row, float* tile, float* up) const {
    const int64_t column = unit * kPanel, count = std::min(kPanel, width_ - column);
    if (operands.bias != nullptr) {
        for (int64_t c = 0; c < count; ++c) tile[c] += operands.bias[column + c];
    }
    if (gate_ != kNone) {
        if (operands.bias != nullptr) {
            for (int64_t c = 0; c < count; ++c) up[c] += operands.bias[width_ + column + c];
        }
        kernels().activate(gate_, tile);
        for (int64_t c = 0; c < kPanel; ++c) tile[c] *= up[c];
    }
    if (activation_ != kNone) kernels().activate(activation_, tile);
    float* output = operands.output + row * width_ + column;
    if (operands.residual != nullptr) {
        const float* residual = operands.residual + row * width_ + column;
        for (int64_t c = 0; c < count; ++c) output[c] = tile[c] + residual[c];
    } else {
        std::memcpy(output, tile, static_cast<size_t>(count) * sizeof(float));
    }
}

}  // namespace kvgraph
