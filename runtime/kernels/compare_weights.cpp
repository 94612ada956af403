// What quantized weights, as they lie in a file, differ by from their source.
#include <algorithm>
#include <vector>

#include "weight_kernels.h"

namespace kvgraph {
namespace {

// Scales or zero points [blocks of rows, blocks of columns], a row of values at a time.
class SharedRows {
   public:
    SharedRows(const float* values, int64_t columns, int64_t row_block, int64_t column_block)
        : values_(values),
          columns_(columns),
          row_block_(row_block),
          column_block_(column_block),
          row_((columns + 15) / 16 * 16) {}

    // One for each column, and zeros up to a multiple of 16; `row` is no less than that of the call before.
    const float* at(int64_t row) {
        if (values_ == nullptr || row / row_block_ == block_) return row_.data();
        block_ = row / row_block_;
        const int64_t count = (columns_ + column_block_ - 1) / column_block_;
        for (int64_t i = 0; i < count; ++i) {
            const auto first = row_.begin() + i * column_block_;
            std::fill_n(first, std::min(column_block_, columns_ - i * column_block_),
                        values_[block_ * count + i]);
        }
        return row_.data();
    }

   private:
    const float* values_;
    const int64_t columns_, row_block_, column_block_;
    int64_t block_ = -1;
    std::vector<float> row_;
};

}  // namespace

// Compares (codes - zeros) * scales, rounded to `compute`, with exact values [rows, columns] of `type`. Codes
// are signed bytes, or with 4 `bits` halves of bytes: columns are even then. Scales and zeros (null: none)
// are shared by blocks of rows and columns. `found` gets the sum of squares of the exact values, that of the
// differences, and the largest one.
KVGRAPH_CALLABLE void kvgraph_compare_weights(const uint8_t* exact, int32_t type, int64_t rows,
                                              int64_t columns, const uint8_t* codes, int32_t bits,
                                              int32_t compute, const float* scales, const float* zeros,
                                              int64_t row_block, int64_t column_block, double* found) {
    const WeightKernels& loops = weight_kernels();
    const Type kind = static_cast<Type>(type);
    const int64_t padded = (columns + 15) / 16 * 16;
    std::vector<float> values(padded);
    std::vector<int8_t> row(padded);
    SharedRows scale(scales, columns, row_block, column_block), zero(zeros, columns, row_block, column_block);
    Difference sums{};
    for (int64_t i = 0; i < rows; ++i) {
        loops.widen(exact + i * columns * bytes_of(kind), kind, columns, values.data());
        const uint8_t* from = codes + i * columns * bits / 8;
        if (bits == 4) {
            loops.unpack_halves(from, columns, row.data());
        } else {
            std::copy_n(reinterpret_cast<const int8_t*>(from), columns, row.data());
        }
        loops.compare(values.data(), row.data(), scale.at(i), zero.at(i), static_cast<Type>(compute), padded,
                      sums);
    }
    found[0] = sums.signal, found[1] = sums.noise, found[2] = sums.largest;
}

}  // namespace kvgraph
