// Loops over weights on their way to a file, for each kind of processor.
#pragma once

#include <cstdint>

namespace kvgraph {

// The types of floats in files, as `weights.py` numbers them.
enum class Type : int32_t { kFloat32, kFloat16, kBFloat16 };

inline int64_t bytes_of(Type type) { return type == Type::kFloat32 ? 4 : 2; }

// An integer format: its least and largest code, and whether they lie around a zero point.
struct IntegerFormat {
    float least, most;
    bool asymmetric;
};

// How blocks are rounded; `ratios` of the full range are tried, the first of them 1.
struct Rounding {
    IntegerFormat format;
    Type scale_type;
    const float* ratios;
    int64_t ratio_count;
    // Whether the values of a block lie side by side, and not one below the other: NumPy adds them in another
    // order.
    bool beside;
};

// Columns that are rounded at a time.
constexpr int64_t kTile = 64;

struct WeightKernels {
    // Consecutive values as float32; false where one is not finite.
    bool (*widen)(const uint8_t* from, Type type, int64_t count, float* to);
    // Blocks of `rows` values [rows][kTile] to codes, one a byte, and their scales and zero points [kTile].
    void (*round_blocks)(const float* values, int64_t rows, const Rounding& how, uint8_t* codes,
                         float* scales, float* zeros);
    // Values [columns] to codes, under scales and, of asymmetric formats, zero points [columns].
    void (*round_row)(const float* values, int64_t columns, IntegerFormat format, const float* scales,
                      const float* zeros, uint8_t* codes);
    // Lets least and most [columns] include the values of a row.
    void (*extend)(const float* row, int64_t columns, float* least, float* most);
    // The low halves of bytes, two a byte.
    void (*pack_halves)(const uint8_t* codes, int64_t count, uint8_t* packed);
};

extern const WeightKernels kAvx512WeightKernels, kAvx2WeightKernels, kGenericWeightKernels;

// Those of the instruction set that the operators use.
const WeightKernels& weight_kernels();

}  // namespace kvgraph
