// Matrices of weights, rounded to integer formats.
#include <algorithm>
#include <string>
#include <vector>

#include "kernels.h"
#include "weight_kernels.h"

namespace kvgraph {

const WeightKernels& weight_kernels() {
    const std::string name = kernels().name;
    if (name == "generic") return kGenericWeightKernels;
#if defined(__x86_64__)
    return name == "avx2" ? kAvx2WeightKernels : kAvx512WeightKernels;
#else
    return kGenericWeightKernels;
#endif
}

namespace {

// As `weights.py` numbers them: int4, uint4, int8, uint8.
constexpr IntegerFormat kFormats[] = {{-8, 7, false}, {0, 15, true}, {-127, 127, false}, {0, 255, true}};

// Columns of a block: its values, and what becomes of them.
struct Tile {
    std::vector<float> values;
    std::vector<uint8_t> codes;
    float scales[kTile], zeros[kTile];

    explicit Tile(int64_t rows) : values(rows * kTile), codes(rows * kTile) {}

    void round(const WeightKernels& loops, int64_t rows, const Rounding& how) {
        loops.round_blocks(values.data(), rows, how, codes.data(), scales, zeros);
    }

    void store_shared(int64_t count, float* to_scales, uint8_t* to_zeros) const {
        std::copy_n(scales, count, to_scales);
        for (int64_t i = 0; i < count; ++i) to_zeros[i] = static_cast<uint8_t>(zeros[i]);
    }
};

}  // namespace

// Rounds a matrix [rows, columns] whose blocks are `block` rows of a column; the last block may be short.
// Gives codes [rows, columns], one a byte, and scales and zero points [blocks, columns]. Returns 0, or 1: a
// value is not finite.
KVGRAPH_CALLABLE int32_t kvgraph_round_columns(const uint8_t* values, int32_t type, int64_t rows,
                                               int64_t columns, int64_t block, int32_t format,
                                               int32_t scale_type, const float* ratios, int64_t ratio_count,
                                               uint8_t* codes, float* scales, uint8_t* zeros) {
    const WeightKernels& loops = weight_kernels();
    const Type kind = static_cast<Type>(type);
    const Rounding how{kFormats[format], static_cast<Type>(scale_type), ratios, ratio_count, false};
    Tile tile(block);
    for (int64_t first = 0; first < rows; first += block, scales += columns, zeros += columns) {
        const int64_t height = std::min(block, rows - first);
        for (int64_t left = 0; left < columns; left += kTile) {
            const int64_t width = std::min(kTile, columns - left);
            for (int64_t row = 0; row < height; ++row) {
                const uint8_t* from = values + ((first + row) * columns + left) * bytes_of(kind);
                if (!loops.widen(from, kind, width, tile.values.data() + row * kTile)) return 1;
            }
            tile.round(loops, height, how);
            for (int64_t row = 0; row < height; ++row) {
                std::copy_n(tile.codes.data() + row * kTile, width, codes + (first + row) * columns + left);
            }
            tile.store_shared(width, scales + left, zeros + left);
        }
    }
    return 0;
}

// Rounds `count` blocks of `block` values that lie side by side. Gives codes, one a byte, in the same order,
// and scales and zero points [count]. With more than one ratio, blocks are of a multiple of 8 values, at
// most 128. Returns as above.
KVGRAPH_CALLABLE int32_t kvgraph_round_rows(const uint8_t* values, int32_t type, int64_t count, int64_t block,
                                            int32_t format, int32_t scale_type, const float* ratios,
                                            int64_t ratio_count, uint8_t* codes, float* scales,
                                            uint8_t* zeros) {
    const WeightKernels& loops = weight_kernels();
    const Type kind = static_cast<Type>(type);
    const Rounding how{kFormats[format], static_cast<Type>(scale_type), ratios, ratio_count, true};
    Tile tile(block);
    std::vector<float> wide(block);
    for (int64_t first = 0; first < count; first += kTile) {
        const int64_t width = std::min(kTile, count - first);
        for (int64_t column = 0; column < width; ++column) {
            if (!loops.widen(values + (first + column) * block * bytes_of(kind), kind, block, wide.data()))
                return 1;
            for (int64_t row = 0; row < block; ++row) tile.values[row * kTile + column] = wide[row];
        }
        tile.round(loops, block, how);
        for (int64_t column = 0; column < width; ++column) {
            uint8_t* to = codes + (first + column) * block;
            for (int64_t row = 0; row < block; ++row) to[row] = tile.codes[row * kTile + column];
        }
        tile.store_shared(width, scales + first, zeros + first);
    }
    return 0;
}

// Least and largest value of each column of a matrix [rows, columns], float32. Returns as above.
KVGRAPH_CALLABLE int32_t kvgraph_column_extremes(const uint8_t* values, int32_t type, int64_t rows,
                                                 int64_t columns, float* least, float* most) {
    const WeightKernels& loops = weight_kernels();
    const Type kind = static_cast<Type>(type);
    std::vector<float> row(columns);
    std::fill_n(least, columns, __builtin_inff());
    std::fill_n(most, columns, -__builtin_inff());
    for (int64_t i = 0; i < rows; ++i) {
        if (!loops.widen(values + i * columns * bytes_of(kind), kind, columns, row.data())) return 1;
        loops.extend(row.data(), columns, least, most);
    }
    return 0;
}

// Codes [rows, columns], one a byte, of a matrix whose columns have their scales and, where the format asks
// for them, zero points [columns].
KVGRAPH_CALLABLE void kvgraph_round_by_column(const uint8_t* values, int32_t type, int64_t rows,
                                              int64_t columns, int32_t format, const float* scales,
                                              const float* zeros, uint8_t* codes) {
    const WeightKernels& loops = weight_kernels();
    const Type kind = static_cast<Type>(type);
    std::vector<float> row(columns);
    for (int64_t i = 0; i < rows; ++i) {
        loops.widen(values + i * columns * bytes_of(kind), kind, columns, row.data());
        loops.round_row(row.data(), columns, kFormats[format], scales, zeros, codes + i * columns);
    }
}

// Half bytes, the first of two in the low half, of `count` codes of which one byte each counts no more.
KVGRAPH_CALLABLE void kvgraph_pack_halves(const uint8_t* codes, int64_t count, uint8_t* packed) {
    weight_kernels().pack_halves(codes, count, packed);
}

}  // namespace kvgraph
