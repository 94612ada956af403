// No instructions but those that every processor of the target has: what the others are checked against.
#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace kvgraph {
namespace {

constexpr int kRows = 2, kColumns = 1, kMixHeads = 2, kMixColumns = 1, kIntegerRows = 4, kFloatRows = 2;

inline float half_to_float(uint16_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const float size = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                       : exponent == 31 ? (fraction ? NAN : INFINITY)
                                        : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    return half & 0x8000 ? -size : size;
}

inline Floats load_half(const uint8_t* from) {
    Floats value;
    for (int i = 0; i < 16; ++i) {
        uint16_t half;
        std::memcpy(&half, from + 2 * i, sizeof half);
        value[i] = half_to_float(half);
    }
    return value;
}
inline void store_half(uint16_t* to, Floats values) {
    const Floats size = magnitude(values), half = all(0.5f);  // whose last bit is 2^-24
    const Ints wide = bits(size), small = bits(size + half) - bits(half);
    const Ints normal = ((wide + 0xfff + ((wide >> 13) & 1)) >> 13) - (112 << 10);
    Floats found = choose(size < 1.0f / 16384, from_bits(small), from_bits(normal));
    found = choose(size < 65520.0f, found, from_bits(Ints{} + 0x7c00));
    found = choose(values == values, found, from_bits(Ints{} + 0x7e00));
    const Halves halves = __builtin_convertvector(bits(found) | ((bits(values) >> 16) & 0x8000), Halves);
    std::memcpy(to, &halves, sizeof halves);
}
inline Ints load_codes(const int8_t* from) {
    Bytes codes;
    std::memcpy(&codes, from, sizeof codes);
    return __builtin_convertvector(codes, Ints);
}
inline float sum_lanes(Floats value) {
    float sum = 0;
    for (int i = 0; i < 16; ++i) sum += value[i];
    return sum;
}
inline Floats sum_each(const Floats* values) {
    Floats sums;
    for (int i = 0; i < 16; ++i) sums[i] = sum_lanes(values[i]);
    return sums;
}
inline float largest_lane(Floats value) {
    float result = value[0];
    for (int i = 1; i < 16; ++i) result = value[i] > result ? value[i] : result;
    return result;
}
inline int32_t sum_lanes(Ints value) {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += value[i];
    return sum;
}

// The signed weights of a block, [kBlock][16], and the number that each column's is too large by.
inline void unpack(Format format, const uint8_t* from, const uint8_t* zero_points, int32_t (*weights)[16]) {
    for (int64_t k = 0; k < kBlock; ++k) {
        for (int c = 0; c < 16; ++c) {
            if (format == Format::kInt8 || format == Format::kInt8Block) {
                weights[k][c] = static_cast<int8_t>(from[k / 4 * 64 + c * 4 + k % 4]);
                continue;
            }
            const uint8_t pair = from[k / 8 * 64 + c * 4 + k % 4];
            const int zero = format == Format::kUint4 ? zero_points[c] : 8;
            weights[k][c] = (k % 8 < 4 ? pair & 15 : pair >> 4) - zero;
        }
    }
}

template <int rows>
void integer_rows(const Packing& packing, const Rounded& in, int64_t first, const uint8_t* panel,
                  float* tile) {
    const bool columns = packing.format == Format::kInt8;
    float sum[rows][16] = {};
    int32_t exact[rows][16] = {};
    const uint8_t* at = panel + (columns ? 64 : 0);
    for (int64_t b = 0; b < in.blocks; ++b, at += packing.block_bytes()) {
        const uint8_t* codes = at + (columns ? 0 : packing.half_scales ? 32 : 64);
        int32_t weights[kBlock][16];
        unpack(packing.format, codes + (packing.format == Format::kUint4 ? 16 : 0), codes, weights);
        const Floats scales = columns               ? all(1.0f)
                              : packing.half_scales ? load_half(at)
                                                    : load(reinterpret_cast<const float*>(at));
        for (int r = 0; r < rows; ++r) {
            const int8_t* input = in.values + (first * in.blocks + b * rows + r) * kBlock;
            int32_t dots[16] = {};
            for (int64_t k = 0; k < kBlock; ++k) {
                for (int c = 0; c < 16; ++c) dots[c] += input[k] * weights[k][c];
            }
            for (int c = 0; c < 16; ++c) {
                if (in.whole_rows)
                    exact[r][c] += dots[c];
                else
                    sum[r][c] += static_cast<float>(dots[c]) *
                                 (in.scales[first * in.blocks + b * rows + r] * scales[c]);
            }
        }
    }
    const Floats scales = columns ? load(reinterpret_cast<const float*>(panel)) : all(1.0f);
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < 16; ++c) {
            tile[r * 16 + c] = in.whole_rows
                                   ? static_cast<float>(exact[r][c]) * (scales[c] * in.scales[first + r])
                                   : sum[r][c] * scales[c];
        }
    }
}

}  // namespace
}  // namespace kvgraph

#include "kernel_table.h"

namespace kvgraph {
constexpr Kernels kGenericKernels = kernel_table("generic");
}  // namespace kvgraph
