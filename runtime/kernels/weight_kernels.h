// Loops over weights on their way to a file, for each kind of processor.
#pragma once

#include <cstdint>

// A function that `weights.py` calls.
#define KVGRAPH_CALLABLE extern "C" __attribute__((visibility("default")))

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

// What differs between weights and what was made of them.
struct Difference {
    // Sums of squares: of the weights, of what they differ by.
    double signal, noise;
    float largest;
};

// Codes of a matrix [inputs, outputs] as they lie in memory, bytes or half bytes; rows begin with a byte.
// Transposed, a row holds the inputs of an output.
struct StoredCodes {
    const uint8_t* rows;
    int64_t pitch;
    bool halves, transposed;
    // What a half byte is changed by, and what fills up blocks and panels.
    uint8_t flip, fill;
};

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
    // Signed 4-bit codes, one a byte, of half bytes.
    void (*unpack_halves)(const uint8_t* packed, int64_t count, int8_t* codes);
    // Adds to `found` what (codes - zeros) * scales, rounded to a type, differ by from exact values [count],
    // a multiple of 16.
    void (*compare)(const float* exact, const int8_t* codes, const float* scales, const float* zeros,
                    Type type, int64_t count, Difference& found);
    // Codes of 32 inputs, the first of them `input`, and 16 outputs, as a block of a panel; of these `height`
    // and `width` are there.
    void (*pack_block)(const StoredCodes& codes, int64_t input, int64_t height, int64_t output, int64_t width,
                       uint8_t* block);
};

extern const WeightKernels kAvx512WeightKernels, kAvx2WeightKernels, kGenericWeightKernels;

// Those of the instruction set that the operators use.
const WeightKernels& weight_kernels();

}  // namespace kvgraph
