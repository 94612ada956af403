// Rounding to nearest: what `kvgraph.quant.quantized_weight` does in NumPy, with the same codes and scales bit for
// bit. Included by each file of loops after it has set its target.
#pragma once

#include "exact.h"

namespace kvgraph {
namespace {

// Scales and zero points of sixteen columns.
struct Scales {
    Floats scale, zero;
};

// A scale as it is stored: never less than the type's least usable value, and 1 for zeros.
inline Floats stored_scale(Floats scale, Type type) {
    const Floats least = all(type == Type::kFloat16 ? 0x1p-24f : 0x1p-126f);
    return scale > 0 ? larger(round_to(scale, type), least) : all(1);
}

// The nearest codes, as floats.
template <bool Asymmetric>
inline Floats codes_of(Floats values, Scales by, IntegerFormat format) {
    Floats scaled = values / by.scale;
    if (Asymmetric) {
        // The limit changes no code, and keeps numbers where `nearest` is right.
        scaled = larger(smaller(scaled, all(65536)), all(-65536));
        return larger(smaller(nearest(scaled) + by.zero, all(format.most)), all(format.least));
    }
    return nearest(larger(smaller(scaled, all(format.most)), all(format.least)));
}

template <bool Asymmetric>
inline Floats squared_error(const float* values, Scales by, IntegerFormat format) {
    const Floats exact = load<Floats>(values);
    Floats codes = codes_of<Asymmetric>(exact, by, format);
    if (Asymmetric) codes -= by.zero;
    const Floats error = codes * by.scale - exact;
    return error * error;
}

// The sum of squared errors of a block's rows, added in the order in which NumPy adds them: one after another
// along columns; where a block's values lie side by side, eight sums in turn (of at most 128 values).
template <bool Asymmetric>
inline Floats block_error(const float* values, int64_t rows, Scales by, IntegerFormat format, bool beside) {
    if (!beside) {
        Floats sum = {};
        for (int64_t row = 0; row < rows; ++row) {
            sum += squared_error<Asymmetric>(values + row * kTile, by, format);
        }
        return sum;
    }
    Floats sums[8] = {};
    for (int64_t row = 0; row < rows; row += 8) {
        for (int i = 0; i < 8; ++i) {
            sums[i] += squared_error<Asymmetric>(values + (row + i) * kTile, by, format);
        }
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

template <bool Asymmetric>
inline Scales scales_of(Floats low, Floats high, float ratio, const Rounding& how) {
    const Floats most = all(how.format.most);
    if (!Asymmetric) return {stored_scale(high * ratio / most, how.scale_type), Floats{}};
    const Floats scale = stored_scale((high - low) * ratio / most, how.scale_type);
    const Floats zero = smaller(-low * ratio / scale, all(65536));
    return {scale, larger(smaller(nearest(zero), most), all(0))};
}

// The best scales of sixteen columns of a block, rows of `kTile` values.
template <bool Asymmetric>
inline Scales choose_scales(const float* values, int64_t rows, const Rounding& how) {
    Floats low = {}, high = {};
    for (int64_t row = 0; row < rows; ++row) {
        const Floats value = load<Floats>(values + row * kTile);
        if (Asymmetric) low = smaller(low, value);
        high = larger(high, Asymmetric ? value : magnitude(value));
    }
    Scales best = scales_of<Asymmetric>(low, high, 1, how);
    if (how.ratio_count < 2) return best;
    Floats least = block_error<Asymmetric>(values, rows, best, how.format, how.beside);
    for (int64_t i = 1; i < how.ratio_count; ++i) {
        const Scales scales = scales_of<Asymmetric>(low, high, how.ratios[i], how);
        const Floats error = block_error<Asymmetric>(values, rows, scales, how.format, how.beside);
        const Ints better = error < least;
        best = {better ? scales.scale : best.scale, better ? scales.zero : best.zero};
        least = better ? error : least;
    }
    return best;
}

template <bool Asymmetric>
inline void round_tile(const float* values, int64_t rows, const Rounding& how, uint8_t* codes, float* scales,
                       float* zeros) {
    for (int64_t first = 0; first < kTile; first += kLanes) {
        const Scales best = choose_scales<Asymmetric>(values + first, rows, how);
        store(scales + first, best.scale);
        store(zeros + first, best.zero);
        for (int64_t i = first; i < rows * kTile; i += kTile) {
            store(codes + i, low_bytes(codes_of<Asymmetric>(load<Floats>(values + i), best, how.format)));
        }
    }
}

void round_blocks(const float* values, int64_t rows, const Rounding& how, uint8_t* codes, float* scales,
                  float* zeros) {
    (how.format.asymmetric ? round_tile<true> : round_tile<false>)(values, rows, how, codes, scales, zeros);
}

template <bool Asymmetric>
inline void round_lanes(const float* row, IntegerFormat format, const float* scales, const float* zeros,
                        uint8_t* codes) {
    const Scales by{load<Floats>(scales), Asymmetric ? load<Floats>(zeros) : Floats{}};
    store(codes, low_bytes(codes_of<Asymmetric>(load<Floats>(row), by, format)));
}

template <bool Asymmetric>
inline void round_columns(const float* row, int64_t columns, IntegerFormat format, const float* scales,
                          const float* zeros, uint8_t* codes) {
    int64_t i = 0;
    for (; i + kLanes <= columns; i += kLanes) {
        round_lanes<Asymmetric>(row + i, format, scales + i, Asymmetric ? zeros + i : zeros, codes + i);
    }
    if (i == columns) return;
    float values[kLanes] = {}, scale[kLanes] = {}, zero[kLanes] = {};
    uint8_t rest[kLanes];
    const size_t left = (columns - i) * sizeof(float);
    std::memcpy(values, row + i, left);
    std::memcpy(scale, scales + i, left);
    if (Asymmetric) std::memcpy(zero, zeros + i, left);
    round_lanes<Asymmetric>(values, format, scale, zero, rest);
    std::memcpy(codes + i, rest, columns - i);
}

void round_row(const float* row, int64_t columns, IntegerFormat format, const float* scales,
               const float* zeros, uint8_t* codes) {
    if (format.asymmetric) {
        round_columns<true>(row, columns, format, scales, zeros, codes);
    } else {
        round_columns<false>(row, columns, format, scales, zeros, codes);
    }
}

}  // namespace
}  // namespace kvgraph
