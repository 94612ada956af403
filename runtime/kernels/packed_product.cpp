#include "packed_product.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace kvgraph {

namespace {
// Rows of the input that pass one panel after another, and how much of the input they may be.
constexpr int64_t kStripRows = 128, kStripBytes = 1 << 20;
static_assert(kStripRows >= kMaxRows);
// From so many rows on, parts of floats are multiplied faster than floats; rows of weights that pass a strip
// of the input before the next ones, which stay in the first-level cache.
constexpr int64_t kManyRows = 9, kSliceRows = 512;
// Elements of the input that one thread has arranged before another is awake.
constexpr int64_t kSmallInput = 1 << 14;

int64_t block_count(int64_t in_features) { return (in_features + kBlock - 1) / kBlock; }

Rounding parse_rounding(const std::string& text) {
    if (text == "float") return Rounding::kNone;
    if (text == "block") return Rounding::kBlocks;
    if (text == "token") return Rounding::kToken;
    if (text == "static") return Rounding::kStatic;
    throw std::invalid_argument("input " + text + " is unknown, expected float, block, token or static");
}
}  // namespace

PackedProduct::PackedProduct(const Attributes& attributes, const std::string& prefix, int64_t in_features,
                             int64_t out_features, Activation gate, Activation activation)
    : in_features_(in_features),
      packing_(parse_packing(attributes.text((prefix + "format").c_str()),
                             attributes.text((prefix + "scale_format").c_str()))),
      rounding_(parse_rounding(attributes.text((prefix + "input").c_str()))),
      gate_(gate),
      activation_(activation),
      width_(gate == kNone ? out_features : out_features / 2) {
    if (rounding_ == Rounding::kStatic) {
        input_scale_ = attributes.number((prefix + "input_scale").c_str());
        if (!(input_scale_ > 0)) throw std::invalid_argument("input_scale is not above zero");
    }
    const bool floats = packing_.format <= Format::kBFloat16;
    if (floats == rounds() || (whole_rows() && packing_.format != Format::kInt8)) {
        throw std::invalid_argument(prefix + "input does not suit the format of the weights");
    }
}

bool PackedProduct::splits(int64_t rows) const {
    return !rounds() && rows >= kManyRows && kernels().split != nullptr;
}

int64_t PackedProduct::share(int64_t units_in_all) const {
    // A share is large enough to be worth a thread's waking, and there are enough of them that none waits
    // long at the end. The panels of a share stay in the second-level cache while every row of the input
    // passes them.
    return std::clamp<int64_t>(units_in_all / 16, std::max<int64_t>(1, 32768 / unit_bytes()),
                               std::max<int64_t>(1, 786432 / unit_bytes()));
}

// Rows of a group that are arranged together.
struct PackedProduct::Tile {
    size_t group;
    int64_t start;  // of the group among all rows
    int64_t first;  // in the group
    int count;
};

void PackedProduct::arrange(const Call& call, Scratch& scratch, const float* input, const int64_t* order,
                            Operands* groups, size_t count) const {
    bool* minimum = nullptr;
    if (rounds())
        minimum = arrange_integers(scratch, groups, count);
    else
        arrange_floats(scratch, input, order, groups, count);
    thread_local std::vector<Tile> reused;
    std::vector<Tile>& tiles = reused;  // of this thread, also where others read it
    tiles.clear();
    int64_t start = 0;
    for (size_t group = 0; group < count; start += groups[group++].rows) {
        const int64_t rows = groups[group].rows;
        if (!rounds() && rows == 1) continue;
        const int64_t step = splits(rows) ? kSplitRows : rounds() ? kernels().rows : kernels().float_rows;
        for (int64_t first = 0; first < rows; first += step) {
            tiles.push_back({group, start, first, static_cast<int>(std::min(step, rows - first))});
        }
    }
    const size_t together = start * in_features_ <= kSmallInput ? tiles.size() : 1;
    if (tiles.empty()) return;
    call.parallel((tiles.size() + together - 1) / together, [&](size_t task) {
        for (size_t i = task * together; i < std::min(tiles.size(), (task + 1) * together); ++i) {
            arrange_tile(groups[tiles[i].group], tiles[i], input, order, minimum);
        }
    });
    for (size_t group = 0; minimum != nullptr && group < count; minimum += groups[group++].rows) {
        groups[group].rounded.has_minimum =
            std::any_of(minimum, minimum + groups[group].rows, [](bool found) { return found; });
    }
}

// Room for floats: the rows of each tile together, or parts of them.
void PackedProduct::arrange_floats(Scratch& scratch, const float* input, const int64_t* order,
                                   Operands* groups, size_t count) const {
    const int64_t row_parts = block_count(in_features_) * kSplitParts * kBlock;
    const auto bytes = [&](int64_t rows) -> size_t {
        if (rows == 1) return 0;
        const int64_t split = (rows + kSplitRows - 1) / kSplitRows * kSplitRows * row_parts * 2;
        const int64_t size = splits(rows) ? split : rows * in_features_ * static_cast<int64_t>(sizeof(float));
        return static_cast<size_t>((size + 63) / 64 * 64);
    };
    size_t total = 0;
    for (size_t group = 0; group < count; ++group) total += bytes(groups[group].rows);
    char* memory = total == 0 ? nullptr : static_cast<char*>(scratch.reserve(total));
    int64_t start = 0;
    for (size_t group = 0; group < count; start += groups[group++].rows) {
        const int64_t rows = groups[group].rows;
        const bool split = splits(rows);
        const int64_t row = order == nullptr ? start : order[start];
        groups[group].parts = split ? reinterpret_cast<uint16_t*>(memory) : nullptr;
        groups[group].input = rows == 1 ? input + row * in_features_ : reinterpret_cast<float*>(memory);
        memory += bytes(rows);
    }
}

// Room for integers, their scales and sums; whether -128 occurs in each row.
bool* PackedProduct::arrange_integers(Scratch& scratch, Operands* groups, size_t count) const {
    const int64_t blocks = block_count(in_features_), padded = blocks * kBlock;
    const int64_t scales = whole_rows() ? 1 : blocks;
    int64_t rows = 0;
    for (size_t group = 0; group < count; ++group) rows += groups[group].rows;
    const size_t value_bytes = static_cast<size_t>(rows * padded);
    const size_t scale_bytes = static_cast<size_t>(rows * scales) * sizeof(float);
    // Kernels read up to 1024 bytes behind the last row.
    char* memory =
        static_cast<char*>(scratch.reserve(value_bytes + 2 * scale_bytes + static_cast<size_t>(rows) + 1024));
    auto* values = reinterpret_cast<int8_t*>(memory);
    auto* factors = reinterpret_cast<float*>(memory + value_bytes);
    auto* sums = reinterpret_cast<int32_t*>(memory + value_bytes + scale_bytes);
    int64_t start = 0;
    for (size_t group = 0; group < count; start += groups[group++].rows) {
        groups[group].parts = nullptr;
        groups[group].rounded = {values + start * padded,
                                 factors + start * scales,
                                 sums + start * scales,
                                 blocks,
                                 whole_rows(),
                                 false};
    }
    return reinterpret_cast<bool*>(memory + value_bytes + 2 * scale_bytes);
}

// Its room is this tile's alone, which is why what reads it may be written here.
void PackedProduct::arrange_tile(const Operands& group, const Tile& tile, const float* input,
                                 const int64_t* order, bool* minimum) const {
    const int64_t blocks = block_count(in_features_), padded = blocks * kBlock, first = tile.first;
    const int64_t scales = whole_rows() ? 1 : blocks;
    const int count = tile.count, wide = kernels().wide_rows;
    const int64_t together = wide > 0 && count >= wide ? 2 * kBlock : kBlock;
    for (int r = 0; r < count; ++r) {
        const int64_t row = tile.start + first + r;
        const float* from = input + (order == nullptr ? row : order[row]) * in_features_;
        if (group.parts != nullptr && !rounds()) {
            kernels().split->row(
                from, in_features_,
                const_cast<uint16_t*>(group.parts) + first * padded * kSplitParts + r * kBlock);
        } else if (!rounds()) {
            float* to = const_cast<float*>(group.input) + first * in_features_ + r;
            for (int64_t k = 0; k < in_features_; ++k) to[k * count] = from[k];
        } else {
            auto* to = const_cast<int8_t*>(group.rounded.values) + first * padded;
            auto* scale = const_cast<float*>(group.rounded.scales) + first * scales + r;
            auto* sum = const_cast<int32_t*>(group.rounded.sums) + first * scales + r;
            minimum[row] =
                whole_rows() ? kernels().round_row(from, in_features_, input_scale_, {to, count, r, together},
                                                   scale, sum)
                             : kernels().round_blocks(from, in_features_, count, to + r * kBlock, scale, sum);
        }
    }
}

void PackedProduct::multiply(const Operands& operands, int64_t begin, int64_t end) const {
    operands.parts == nullptr ? panels(operands, begin, end) : split_panels(operands, begin, end);
}

void PackedProduct::panels(const Operands& operands, int64_t begin, int64_t end) const {
    const int64_t step = rounds() ? kernels().rows : kernels().float_rows;
    const int64_t panel_bytes = packing_.panel_bytes(in_features_);
    const int parts = gate_ == kNone ? 1 : 2;
    // So many rows that what they need of the input stays in the second-level cache too.
    const int64_t row_bytes = in_features_ * (rounds() ? 1 : 4);
    const int64_t strip = std::clamp<int64_t>(kStripBytes / row_bytes / step, 1, kStripRows / step) * step;
    alignas(64) float tiles[2][kStripRows * kPanel];
    for (int64_t top = 0; top < operands.rows; top += strip) {
        const int64_t bottom = std::min(operands.rows, top + strip);
        for (int64_t unit = begin; unit < end; ++unit) {
            for (int part = 0; part < parts; ++part) {
                const uint8_t* panel = operands.weights + (unit * parts + part) * panel_bytes;
                if (rounds())
                    integer_panel(operands, top, bottom, panel, tiles[part]);
                else
                    float_panel(operands, top, bottom, panel, tiles[part]);
            }
            finish(operands, unit, top, bottom, tiles[0], tiles[1]);
        }
    }
}

// The same from parts of floats. A slice of each panel passes all rows of a strip, and adds to their tiles.
void PackedProduct::split_panels(const Operands& operands, int64_t begin, int64_t end) const {
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
            const float* tile = tiles + (unit - begin) * a_unit * panel_tile;
            finish(operands, unit, top, bottom, tile, tile + panel_tile);
        }
    }
}

// The rows top ... bottom - 1 times one panel.
void PackedProduct::integer_panel(const Operands& operands, int64_t top, int64_t bottom, const uint8_t* panel,
                                  float* tile) const {
    for (int64_t row = top; row < bottom; row += kernels().rows) {
        const int count = static_cast<int>(std::min<int64_t>(kernels().rows, bottom - row));
        kernels().integer_tile(packing_, operands.rounded, row, count, panel, tile + (row - top) * kPanel);
    }
}

// The same in slices of in_features, whose weights stay in the first-level cache while the rows pass.
void PackedProduct::float_panel(const Operands& operands, int64_t top, int64_t bottom, const uint8_t* panel,
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

// The rows top ... bottom - 1 of a unit, whose sums are in `tile` and, where it is gated, `up`.
void PackedProduct::finish(const Operands& operands, int64_t unit, int64_t top, int64_t bottom,
                           const float* tile, const float* up) const {
    const bool gated = gate_ != kNone;
    const int64_t column = unit * kPanel, place = top * width_ + column;
    const float* bias = operands.bias == nullptr ? nullptr : operands.bias + column;
    kernels().finish({tile, gated ? up : nullptr, bias, bias != nullptr && gated ? bias + width_ : nullptr,
                      operands.residual == nullptr ? nullptr : operands.residual + place,
                      operands.output + place, bottom - top, std::min(kPanel, width_ - column), width_, gate_,
                      activation_});
}

}  // namespace kvgraph
