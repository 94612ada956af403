// The loops of `weight_kernels.h`. Included by each file of loops after it has set its target.
#pragma once

#include "exact.h"
#include "rounding_loops.h"

namespace kvgraph {
namespace {

inline Words not_finite(Floats values) { return (Words)(((Words)values & 0x7f800000) == 0x7f800000); }

// Values of consecutive numbers as float32; false where one is not finite.
inline bool widen_row(const uint8_t* from, Type type, int64_t count, float* to) {
    Words bad = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        const Floats values = load_floats(from + i * bytes_of(type), type);
        bad |= not_finite(values);
        store(to + i, values);
    }
    if (i < count) {
        uint8_t rest[kLanes * 4] = {};
        std::memcpy(rest, from + i * bytes_of(type), (count - i) * bytes_of(type));
        const Floats values = load_floats(rest, type);
        bad |= not_finite(values);
        std::memcpy(to + i, &values, (count - i) * sizeof(float));
    }
    // By way of memory: lanes taken one by one would cost more than all else does for a row of a tile.
    uint64_t any = 0, pairs[kLanes / 2];
    store(pairs, bad);
    for (const uint64_t pair : pairs) any |= pair;
    return any == 0;
}

bool widen(const uint8_t* from, Type type, int64_t count, float* to) {
    switch (type) {
        case Type::kFloat32:
            return widen_row(from, Type::kFloat32, count, to);
        case Type::kFloat16:
            return widen_row(from, Type::kFloat16, count, to);
        default:
            return widen_row(from, Type::kBFloat16, count, to);
    }
}

void extend(const float* row, int64_t columns, float* least, float* most) {
    for (int64_t i = 0; i < columns; ++i) {
        least[i] = row[i] < least[i] ? row[i] : least[i];
        most[i] = row[i] > most[i] ? row[i] : most[i];
    }
}

void pack_halves(const uint8_t* codes, int64_t count, uint8_t* packed) {
    for (int64_t i = 0; i < count / 2; ++i) {
        packed[i] = static_cast<uint8_t>((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
    }
    if (count % 2) packed[count / 2] = codes[count - 1] & 15;
}

void unpack_halves(const uint8_t* packed, int64_t count, int8_t* codes) {
    for (int64_t i = 0; i < count / 2; ++i) {
        codes[2 * i] = static_cast<int8_t>(((packed[i] & 15) ^ 8) - 8);
        codes[2 * i + 1] = static_cast<int8_t>(((packed[i] >> 4) ^ 8) - 8);
    }
}

typedef double Doubles __attribute__((vector_size(64)));
typedef float HalfFloats __attribute__((vector_size(32)));
typedef int16_t SignedShorts __attribute__((vector_size(32)));
typedef int8_t SignedBytes __attribute__((vector_size(16)));

inline void add_squares(Floats values, Doubles* sums) {
    HalfFloats halves[2];
    store(halves, values);
    for (int i = 0; i < 2; ++i) {
        const Doubles wide = __builtin_convertvector(halves[i], Doubles);
        sums[i] += wide * wide;
    }
}

inline void compare_as(const float* exact, const int8_t* codes, const float* scales, const float* zeros,
                       Type type, int64_t count, Difference& found) {
    Doubles signal[2] = {}, noise[2] = {};
    Floats largest = {};
    for (int64_t i = 0; i < count; i += kLanes) {
        // In steps that are one instruction each.
        const SignedShorts shorts = __builtin_convertvector(load<SignedBytes>(codes + i), SignedShorts);
        const Ints whole = __builtin_convertvector(shorts, Ints);
        const Floats code = __builtin_convertvector(whole, Floats);
        const Floats value = round_to((code - load<Floats>(zeros + i)) * load<Floats>(scales + i), type);
        const Floats original = load<Floats>(exact + i), error = value - original;
        add_squares(original, signal);
        add_squares(error, noise);
        largest = larger(magnitude(error), largest);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
        found.signal += signal[lane / 8][lane % 8];
        found.noise += noise[lane / 8][lane % 8];
        found.largest = found.largest < largest[lane] ? largest[lane] : found.largest;
    }
}

void compare(const float* exact, const int8_t* codes, const float* scales, const float* zeros, Type type,
             int64_t count, Difference& found) {
    switch (type) {
        case Type::kFloat32:
            return compare_as(exact, codes, scales, zeros, Type::kFloat32, count, found);
        case Type::kFloat16:
            return compare_as(exact, codes, scales, zeros, Type::kFloat16, count, found);
        default:
            return compare_as(exact, codes, scales, zeros, Type::kBFloat16, count, found);
    }
}

// Bytes of sixteen columns and four rows, by columns.
inline Words by_fours(const Bytes* rows) {
    const Words first = __builtin_convertvector(rows[0], Words),
                second = __builtin_convertvector(rows[1], Words);
    const Words third = __builtin_convertvector(rows[2], Words),
                fourth = __builtin_convertvector(rows[3], Words);
    return first | second << 8 | third << 16 | fourth << 24;
}

// Sixteen codes, one a byte, of eight bytes.
inline Bytes unpack_row(const uint8_t* packed) {
    typedef uint8_t HalfBytes __attribute__((vector_size(8)));
    typedef uint16_t HalfShorts __attribute__((vector_size(16)));
    const HalfShorts pairs = __builtin_convertvector(load<HalfBytes>(packed), HalfShorts);
    return (Bytes)((pairs | pairs << 4) & 0x0f0f);
}

// The block of 32 rows of 16 codes, one a byte; half bytes hold the inputs i and i + 4 of groups of eight.
inline void store_block(Bytes* rows, const StoredCodes& codes, uint8_t* block) {
    if (!codes.halves) {
        for (int group = 0; group < 8; ++group) store(block + group * 64, by_fours(rows + group * 4));
        return;
    }
    for (int group = 0; group < 4; ++group) {
        Bytes* from = rows + group * 8;
        for (int i = 0; i < 4; ++i) from[i] |= from[i + 4] << 4;
        store(block + group * 64, by_fours(from));
    }
}

inline uint8_t code_at(const StoredCodes& codes, int64_t input, int64_t output) {
    const int64_t row = codes.transposed ? output : input, column = codes.transposed ? input : output;
    const uint8_t* from = codes.rows + row * codes.pitch;
    if (!codes.halves) return from[column];
    return ((from[column / 2] >> (column % 2 * 4)) & 15) ^ codes.flip;
}

// Four half bytes as bytes.
inline uint32_t spread(uint32_t halves) {
    const uint32_t pairs = (halves | halves << 8) & 0x00ff00ff;
    return (pairs | pairs << 4) & 0x0f0f0f0f;
}

inline void pack_transposed(const StoredCodes& codes, const uint8_t* from, uint8_t* block) {
    const int groups = codes.halves ? 4 : 8;
    const uint32_t flip = codes.flip * 0x11111111u;
    for (int column = 0; column < kLanes; ++column, from += codes.pitch) {
        for (int group = 0; group < groups; ++group) {
            uint32_t word = load<uint32_t>(from + group * 4);
            if (codes.halves) word = (spread(word & 0xffff) | spread(word >> 16) << 4) ^ flip;
            store(block + (group * kLanes + column) * 4, word);
        }
    }
}

void pack_block(const StoredCodes& codes, int64_t input, int64_t height, int64_t output, int64_t width,
                uint8_t* block) {
    Bytes rows[32];
    if (height < 32 || width < kLanes) {
        for (int64_t i = 0; i < 32; ++i) {
            for (int64_t j = 0; j < kLanes; ++j) {
                rows[i][j] = i < height && j < width ? code_at(codes, input + i, output + j) : codes.fill;
            }
        }
    } else if (codes.transposed) {
        const int64_t offset = codes.halves ? input / 2 : input;
        return pack_transposed(codes, codes.rows + output * codes.pitch + offset, block);
    } else {
        const uint8_t* from = codes.rows + input * codes.pitch + (codes.halves ? output / 2 : output);
        for (int i = 0; i < 32; ++i, from += codes.pitch) {
            rows[i] = codes.halves ? unpack_row(from) ^ codes.flip : load<Bytes>(from);
        }
    }
    store_block(rows, codes, block);
}

constexpr WeightKernels kLoops{widen,       round_blocks,  round_row, extend,
                               pack_halves, unpack_halves, compare,   pack_block};

}  // namespace
}  // namespace kvgraph
