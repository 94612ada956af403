// What the operators ask of a processor. Every instruction set has one table of these functions; they are
// compiled from the same sources, each under its own target options, and chosen when the library is loaded.
#pragma once

#include <cstdint>
#include <string>

#include "attention.h"

namespace kvgraph {

constexpr int64_t kPanel = 16;  // columns of a panel of packed weights
constexpr int64_t kBlock = 32;  // rows of weights that share a scale, and inputs that share one
constexpr int kMaxRows =
    64;  // rows of the input that any kernel takes at once, and that its tile has room for

enum class Format { kFloat32, kFloat16, kBFloat16, kInt8, kInt8Block, kInt4, kUint4 };

struct Packing {
    Format format;
    bool half_scales;  // scales of blocks are float16

    int64_t block_bytes()
        const;  // of integer formats, scales included; kInt8 keeps its scales before the panel
    int64_t panel_bytes(int64_t in_features) const;
};

enum Activation { kNone, kSilu, kGelu, kGeluTanh, kRelu };
Activation parse_activation(const std::string& name);

Packing parse_packing(const std::string& format, const std::string& scale_format);

// Rows of the input as integer products take them. The rows of a tile lie together, block by block: whole
// rows would be a power of two apart as a rule, and compete for the same lines of the first-level cache.
struct Rounded {
    const int8_t* values;  // by tile: [blocks, rows of the tile, kBlock], or as RowPlace says
    const float* scales;   // by tile: [blocks, rows of the tile], or [rows] where a row has one scale
    const int32_t* sums;   // of the values, the same shape
    int64_t blocks;
    bool whole_rows;   // one scale a row
    bool has_minimum;  // -128 occurs, whose sign cannot be turned in 8 bits
};

// Where a row with one scale goes: [padded inputs / together, rows of the tile, together], and where
// `together` does not divide the padded inputs, what is left over as [rows of the tile, kBlock] behind that.
struct RowPlace {
    int8_t* tile;
    int64_t rows, row;
    int64_t together;  // kBlock or 2 kBlock
};

// Floats as sums of bfloat16, for units that multiply nothing else.
constexpr int64_t kSplitRows = 16;  // rows of a tile of inputs
constexpr int kSplitParts = 3;      // bfloat16 that make up a float32
int split_parts(Format format);     // that make up a weight

// Up to 32 rows times up to two panels. Tiles of inputs are [blocks, kSplitParts, kSplitRows, kBlock], tiles
// of weights [blocks, parts, kBlock / 2, kPanel, 2].
struct SplitProduct {
    const uint16_t* input;
    int64_t input_step;  // from one tile of rows to the next
    const uint16_t* weights;
    int64_t weights_step;  // from one panel to the next
    int64_t blocks;
    int parts, row_tiles, panels;
    bool add;            // to what `tile` holds
    float* tile;         // [panels][row_tiles * kSplitRows, kPanel]
    int64_t panel_step;  // from one panel's part of `tile` to the next
};

struct SplitKernels {
    // One row of a tile of inputs; `to` is its first number. What is behind `size` in the last block is zero.
    void (*row)(const float* row, int64_t size, uint16_t* to);
    // One panel of float weights from its row 0 on.
    void (*panel)(Format, const uint8_t* panel, int64_t size, uint16_t* to);
    void (*multiply)(const SplitProduct& product);
};

// What happens to the sums of a panel, or of two where it is the gate of the other: bias, activation,
// residual, and a place in the result for the columns that are no padding.
struct Finish {
    const float* tile;      // [rows, kPanel]
    const float* up;        // likewise; null where nothing is gated
    const float* bias;      // [count], or null
    const float* up_bias;   // likewise
    const float* residual;  // [rows, count], `width` numbers from one row to the next; or null
    float* output;          // likewise
    int64_t rows, count, width;
    Activation gate, activation;
};

struct Kernels {
    const char* name;
    int rows;        // rows of the input that `integer_tile` takes at once
    int float_rows;  // that `float_tile` takes
    int wide_rows;   // tiles of so many rows with one scale each take 2 kBlock inputs together; 0: none does

    // tile[row * 16 + column] = input row . panel column, for the `count` rows of the tile that starts at row
    // `first`. Float inputs are those of the tile alone, [in_features, count], and may be added in several
    // parts of in_features. Integer kernels may read 1024 bytes behind the last row, and write rubbish to the
    // rows of the tile behind `count`.
    void (*integer_tile)(const Packing&, const Rounded&, int64_t first, int count, const uint8_t* panel,
                         float* tile);
    void (*float_tile)(Format, const float* input, int64_t in_features, int count, const uint8_t* panel,
                       bool add, float* tile);

    // One row of a tile of `rows` in int8, written to its places in the tile: a scale for each block, or one
    // scale (given, or 0 for that of the largest value). Returns whether -128 occurs.
    bool (*round_blocks)(const float* row, int64_t size, int rows, int8_t* values, float* scales,
                         int32_t* sums);
    bool (*round_row)(const float* row, int64_t size, float scale, const RowPlace& place, float* scales,
                      int32_t* sums);

    // One column of a panel, in float32.
    void (*gather)(const Packing&, const uint8_t* panel, int column, int64_t size, float* to);

    void (*finish)(const Finish& panel);

    CacheKernels caches[kCacheTypes];  // by CacheType

    const SplitKernels* split;  // null where float32 itself is multiplied as fast
};

// Of the best instruction set that this processor has, or of the one chosen by name; false where it lacks
// that one.
const Kernels& kernels();
bool choose_kernels(const std::string& name);

extern const Kernels kGenericKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
bool amx_available();
Kernels amx_kernels();
extern const SplitKernels kAmxSplitKernels;
#endif

}  // namespace kvgraph
