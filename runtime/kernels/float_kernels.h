// Kernels whose arithmetic is float32, for the target that the including file has set: products with float
// weights, rounding of inputs to 8 bits, activations.
#pragma once

#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace kvgraph {
namespace {

struct Float32Weights {
    static constexpr int64_t kBytes = 64;
    static Floats at(const uint8_t* from) { return load(reinterpret_cast<const float*>(from)); }
};
struct Float16Weights {
    static constexpr int64_t kBytes = 32;
    static Floats at(const uint8_t* from) { return load_half(from); }
};
struct BFloat16Weights {
    static constexpr int64_t kBytes = 32;
    static Floats at(const uint8_t* from) {
        Halves value;
        std::memcpy(&value, from, sizeof value);
        return from_bits(__builtin_convertvector(value, Ints) << 16);
    }
};

// Few rows have several sums each, so that none waits for the one before.
template <class Weights, int rows>
void float_rows(const float* input, int64_t size, const uint8_t* panel, bool add, float* tile) {
    constexpr int parts = rows > 4 ? 2 : rows > 2 ? 4 : 8, sums = rows > 4 ? 1 : parts;
    Floats sum[sums][rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        sum[0][r] = add ? load(tile + r * 16) : Floats{};
#pragma GCC unroll 16
        for (int s = 1; s < sums; ++s) sum[s][r] = Floats{};
    }
    int64_t k = 0;
    for (; k + parts <= size; k += parts) {
        const uint8_t* at = panel + k * Weights::kBytes;
#pragma GCC unroll 16
        for (int line = 0; line < parts * Weights::kBytes; line += 64) prefetch(at + kAhead + line);
#pragma GCC unroll 16
        for (int part = 0; part < parts; ++part) {
            const Floats weights = Weights::at(at + part * Weights::kBytes);
#pragma GCC unroll 16
            for (int r = 0; r < rows; ++r) sum[part % sums][r] += input[(k + part) * rows + r] * weights;
        }
    }
    for (; k < size; ++k) {
        const Floats weights = Weights::at(panel + k * Weights::kBytes);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) sum[0][r] += input[k * rows + r] * weights;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        Floats total = sum[0][r];
#pragma GCC unroll 16
        for (int s = 1; s < sums; ++s) total += sum[s][r];
        store(tile + r * 16, total);
    }
}

template <class Weights, int rows>
void float_count(const float* input, int64_t size, int count, const uint8_t* panel, bool add, float* tile) {
    if (count == rows) return float_rows<Weights, rows>(input, size, panel, add, tile);
    if constexpr (rows > 1) float_count<Weights, rows - 1>(input, size, count, panel, add, tile);
}

template <int rows>
void float_tile(Format format, const float* input, int64_t size, int count, const uint8_t* panel, bool add,
                float* tile) {
    switch (format) {
        case Format::kFloat16:
            return float_count<Float16Weights, rows>(input, size, count, panel, add, tile);
        case Format::kBFloat16:
            return float_count<BFloat16Weights, rows>(input, size, count, panel, add, tile);
        default:
            return float_count<Float32Weights, rows>(input, size, count, panel, add, tile);
    }
}

// At most sixteen numbers, the rest zero.
inline Floats load_part(const float* from, int64_t count) {
    if (count >= 16) return load(from);
    float part[16] = {};
    if (count > 0) std::memcpy(part, from, static_cast<size_t>(count) * sizeof(float));
    return load(part);
}

// Sixteen numbers over the scale, rounded and held within int8; their sum.
inline Ints round_to_bytes(Floats numbers, Floats scale, int8_t* values) {
    const Floats quotient = larger(smaller(numbers / scale, all(127.0f)), all(-128.0f));
    const Ints integers = nearest(quotient);
    const Bytes bytes = __builtin_convertvector(integers, Bytes);
    std::memcpy(values, &bytes, sizeof bytes);
    return integers;
}

// A value that is not finite makes its scale NaN, as it would make a float product.
bool round_blocks(const float* row, int64_t size, int rows, int8_t* values, float* scales, int32_t* sums) {
    for (int64_t block = 0; block * kBlock < size; ++block) {
        const float* from = row + block * kBlock;
        const int64_t count = size - block * kBlock;
        const Floats low = load_part(from, count), high = load_part(from + 16, count - 16);
        const Floats most = larger(magnitude(low), magnitude(high));
        const float scale = largest_lane(most) / 127.0f;
        const Floats divisor = all(scale > 0 ? scale : 1.0f);
        int8_t* to = values + block * rows * kBlock;
        sums[block * rows] =
            sum_lanes(round_to_bytes(low, divisor, to) + round_to_bytes(high, divisor, to + 16));
        scales[block * rows] = scale + sum_lanes((low + high) * 0.0f);
    }
    return false;
}

bool round_row(const float* row, int64_t size, float scale, const RowPlace& place, float* scales,
               int32_t* sums) {
    Floats most = {}, nothing = {};
    for (int64_t k = 0; k < size; k += 16) {
        const Floats numbers = load_part(row + k, size - k);
        most = larger(magnitude(numbers), most);
        nothing += numbers * 0.0f;
    }
    if (scale == 0) scale = largest_lane(most) / 127.0f;
    const Floats divisor = all(scale > 0 ? scale : 1.0f);
    Ints sum = {}, least = {};
    const int64_t padded = (size + kBlock - 1) / kBlock * kBlock;
    for (int64_t begin = 0; begin < padded; begin += place.together) {
        const int64_t length = padded - begin < place.together ? padded - begin : place.together;
        int8_t* to = place.tile + begin * place.rows + place.row * length;
        for (int64_t k = 0; k < length; k += 16) {
            const Ints integers =
                round_to_bytes(load_part(row + begin + k, size - begin - k), divisor, to + k);
            sum += integers;
            least |= integers == -128;
        }
    }
    *scales = scale + sum_lanes(nothing);
    *sums = sum_lanes(sum);
    return sum_lanes(least) != 0;
}

// Of 4-bit and 8-bit weights, as DequantizeLinear computes it.
inline float dequantize(const Packing& packing, const uint8_t* panel, int column, int64_t k) {
    const bool columns = packing.format == Format::kInt8;
    const uint8_t* at = panel + k / kBlock * packing.block_bytes() + (columns ? 64 : 0);
    const uint8_t* scales = columns ? panel : at;
    const Floats scale =
        packing.half_scales ? load_half(scales) : load(reinterpret_cast<const float*>(scales));
    const uint8_t* codes = at + (columns ? 0 : packing.half_scales ? 32 : 64);
    const int64_t i = k % kBlock;
    if (columns || packing.format == Format::kInt8Block) {
        return static_cast<int8_t>(codes[i / 4 * 64 + column * 4 + i % 4]) * scale[column];
    }
    int zero = 8;
    if (packing.format == Format::kUint4) {
        zero = codes[column];
        codes += 16;
    }
    const uint8_t pair = codes[i / 8 * 64 + column * 4 + i % 4];
    return static_cast<float>((i % 8 < 4 ? pair & 15 : pair >> 4) - zero) * scale[column];
}

void gather(const Packing& packing, const uint8_t* panel, int column, int64_t size, float* to) {
    for (int64_t k = 0; k < size; ++k) {
        switch (packing.format) {
            case Format::kFloat32:
                to[k] = Float32Weights::at(panel + k * 64)[column];
                break;
            case Format::kFloat16:
                to[k] = Float16Weights::at(panel + k * 32)[column];
                break;
            case Format::kBFloat16:
                to[k] = BFloat16Weights::at(panel + k * 32)[column];
                break;
            default:
                to[k] = dequantize(packing, panel, column, k);
        }
    }
}

// (1 + tanh(u)) / 2 = 1 / (1 + e^-2u).
inline Floats gelu_tanh(Floats x) {
    const float twice_root = 1.5957691216f;  // of 2 / pi
    return x / (1.0f + exponential(-twice_root * (x + 0.044715f * x * x * x)));
}

inline Floats activated(int activation, Floats x) {
    switch (activation) {
        case kSilu:
            return x / (1.0f + exponential(-x));
        case kGeluTanh:
            return gelu_tanh(x);
        case kRelu:
            return larger(x, Floats{});
        case kGelu:
            for (int i = 0; i < 16; ++i) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
            return x;
        default:
            return x;
    }
}

void finish(const Finish& panel) {
    const auto [tile, up, bias, up_bias, residual, output, rows, count, width, gate, activation] = panel;
    const Floats added = bias == nullptr ? Floats{} : load_part(bias, count);
    const Floats up_added = up_bias == nullptr ? Floats{} : load_part(up_bias, count);
    for (int64_t row = 0; row < rows; ++row) {
        Floats result = load(tile + row * kPanel) + added;
        if (up != nullptr) result = activated(gate, result) * (load(up + row * kPanel) + up_added);
        result = activated(activation, result);
        if (residual != nullptr) result += load_part(residual + row * width, count);
        if (count == kPanel)
            store(output + row * width, result);
        else
            std::memcpy(output + row * width, &result, static_cast<size_t>(count) * sizeof(float));
    }
}

}  // namespace
}  // namespace kvgraph
