// AVX2 without VNNI. A byte product there adds pairs in 16 bits and saturates, so one side is kept small:
// 4-bit weights are at most 15, and of 8-bit ones the size alone is multiplied, at most 128 * 127 * 2.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#pragma GCC target("avx2,fma,f16c")
#include "simd.h"

namespace kvgraph {
namespace {

constexpr int kRows = 6, kColumns = 1, kMixHeads = 4, kMixColumns = 1, kIntegerRows = 4, kFloatRows = 6;

// Through memory it takes four times as long, which is what GCC before 12 is left with.
inline Floats join(__m256 low, __m256 high) {
#if __has_builtin(__builtin_shufflevector)
    typedef float Half __attribute__((vector_size(32)));
    return __builtin_shufflevector((Half)low, (Half)high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                                   15);
#else
    Floats value;
    std::memcpy(&value, &low, sizeof low);
    std::memcpy(reinterpret_cast<char*>(&value) + 32, &high, sizeof high);
    return value;
#endif
}
inline Floats load_half(const uint8_t* from) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(from);
    return join(_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
}
inline void store_half(uint16_t* to, Floats values) {
    __m256 half[2];
    std::memcpy(half, &values, sizeof half);
    for (int i = 0; i < 2; ++i) {
        const __m128i halves = _mm256_cvtps_ph(half[i], _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i, halves);
    }
}
inline Ints load_codes(const int8_t* from) {
    const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8));
    return bits(join(_mm256_castsi256_ps(_mm256_cvtepi8_epi32(low)),
                     _mm256_castsi256_ps(_mm256_cvtepi8_epi32(high))));
}
template <class Reduce>
inline float reduce(Floats value, const Reduce& step) {
    __m256 half[2];
    std::memcpy(half, &value, sizeof half);
    const __m256 both = step(half[0], half[1]);
    __m256 part = step(both, _mm256_permute2f128_ps(both, both, 1));
    part = step(part, _mm256_permute_ps(part, 0x4e));
    return _mm256_cvtss_f32(step(part, _mm256_permute_ps(part, 0xb1)));
}
inline float sum_lanes(Floats value) {
    return reduce(value, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}
inline Floats sum_each(const Floats* values) {
    Floats sums;
    for (int i = 0; i < 16; ++i) sums[i] = sum_lanes(values[i]);
    return sums;
}
inline float largest_lane(Floats value) {
    return reduce(value, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}
inline int32_t sum_lanes(Ints value) {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += value[i];
    return sum;
}

inline __m256i load_bytes(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
inline __m256i four_inputs(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return _mm256_set1_epi32(four);
}
inline __m256 load_scales(const uint8_t* from, bool half, int side) {
    if (!half) return _mm256_loadu_ps(reinterpret_cast<const float*>(from) + side * 8);
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + side));
}

// Eight columns (a `side` of the panel) of 32 inputs: eight registers of 8 columns x 4 inputs.
template <bool four>
inline void load_weights(const uint8_t* from, int side, __m256i* weights) {
    const __m256i low = _mm256_set1_epi8(15);
#pragma GCC unroll 16
    for (int g = 0; g < (four ? 4 : 8); ++g) {
        const __m256i codes = load_bytes(from + g * 64 + side * 32);
        if constexpr (four) {
            weights[2 * g] = _mm256_and_si256(codes, low);
            weights[2 * g + 1] = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
        } else {
            weights[g] = codes;
        }
    }
}

template <bool four>
inline __m256i products(const __m256i* weights, const int8_t* input) {
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (four) {
        // Eight sums of pairs of at most 15 * 128 * 2 stay within 16 bits.
        __m256i pairs = _mm256_maddubs_epi16(weights[0], four_inputs(input));
#pragma GCC unroll 16
        for (int g = 1; g < 8; ++g) {
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(weights[g], four_inputs(input + g * 4)));
        }
        return _mm256_madd_epi16(pairs, ones);
    } else {
        __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 16
        for (int g = 0; g < 8; ++g) {
            const __m256i signed_input = _mm256_sign_epi8(four_inputs(input + g * 4), weights[g]);
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights[g]), signed_input);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
        return sum;
    }
}

template <Format format, int rows>
void block_side(bool half, const Rounded& in, int64_t first, const uint8_t* panel, int side, float* tile) {
    constexpr bool four = format == Format::kInt4 || format == Format::kUint4;
    __m256 sum[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) sum[r] = _mm256_setzero_ps();
    const uint8_t* at = panel + (format == Format::kInt8 ? 64 : 0);
    for (int64_t b = 0; b < in.blocks; ++b) {
        __m256i weights[8], zero_points = _mm256_set1_epi32(8);
        __m256 scale = _mm256_set1_ps(1.0f);
        if constexpr (format != Format::kInt8) {
            scale = load_scales(at, half, side);
            at += half ? 32 : 64;
        }
        if constexpr (format == Format::kUint4) {
            zero_points =
                _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + side * 8)));
            at += 16;
        }
        load_weights<four>(at, side, weights);
        at += four ? 256 : 512;
        if (side == 0) {
            for (int line = 0; line < (four ? 5 : 9); ++line) prefetch(at + kAhead + line * 64);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            const int64_t row = first * in.blocks + b * rows + r;
            __m256i dots = products<four>(weights, in.values + (first * in.blocks + b * rows + r) * kBlock);
            if constexpr (four) {
                const __m256i excess = _mm256_mullo_epi32(zero_points, _mm256_set1_epi32(in.sums[row]));
                dots = _mm256_sub_epi32(dots, excess);
            }
            const __m256 factor = _mm256_mul_ps(_mm256_set1_ps(in.scales[row]), scale);
            sum[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), factor, sum[r]);
        }
    }
    __m256 columns = _mm256_set1_ps(1.0f);
    if constexpr (format == Format::kInt8) columns = load_scales(panel, false, side);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        _mm256_storeu_ps(tile + r * 16 + side * 8, _mm256_mul_ps(sum[r], columns));
    }
}

// Inputs of -128 have no opposite in 8 bits: in 16 bits, then.
inline __m256i wide_products(const __m256i* weights, const int8_t* input) {
    __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 16
    for (int g = 0; g < 8; ++g) {
        const __m256i four = four_inputs(input + g * 4);
        const __m256i inputs = _mm256_cvtepi8_epi16(_mm256_castsi256_si128(four));
        const __m256i low =
            _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(weights[g])), inputs);
        const __m256i high =
            _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm256_extracti128_si256(weights[g], 1)), inputs);
        // Within 128 bits hadd puts low's sums before high's: columns 0 1 | 4 5 and 2 3 | 6 7.
        sum = _mm256_add_epi32(sum, _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xd8));
    }
    return sum;
}

template <int rows>
void whole_side(const Rounded& in, int64_t first, const uint8_t* panel, int side, float* tile) {
    __m256i dots[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) dots[r] = _mm256_setzero_si256();
    for (int64_t b = 0; b < in.blocks; ++b) {
        __m256i weights[8];
        load_weights<false>(panel + 64 + b * 512, side, weights);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            const int8_t* input = in.values + (first * in.blocks + b * rows + r) * kBlock;
            const __m256i part =
                in.has_minimum ? wide_products(weights, input) : products<false>(weights, input);
            dots[r] = _mm256_add_epi32(dots[r], part);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        const __m256 scale =
            _mm256_mul_ps(load_scales(panel, false, side), _mm256_set1_ps(in.scales[first + r]));
        _mm256_storeu_ps(tile + r * 16 + side * 8, _mm256_mul_ps(_mm256_cvtepi32_ps(dots[r]), scale));
    }
}

template <int rows>
void integer_rows(const Packing& packing, const Rounded& in, int64_t first, const uint8_t* panel,
                  float* tile) {
    const bool half = packing.half_scales;
    for (int side = 0; side < 2; ++side) {
        switch (packing.format) {
            case Format::kInt4:
                block_side<Format::kInt4, rows>(half, in, first, panel, side, tile);
                break;
            case Format::kUint4:
                block_side<Format::kUint4, rows>(half, in, first, panel, side, tile);
                break;
            case Format::kInt8Block:
                block_side<Format::kInt8Block, rows>(half, in, first, panel, side, tile);
                break;
            default:
                if (in.whole_rows)
                    whole_side<rows>(in, first, panel, side, tile);
                else
                    block_side<Format::kInt8, rows>(half, in, first, panel, side, tile);
        }
    }
}

}  // namespace
}  // namespace kvgraph

#include "kernel_table.h"

namespace kvgraph {
constexpr Kernels kAvx2Kernels = kernel_table("avx2");
}  // namespace kvgraph
#endif
