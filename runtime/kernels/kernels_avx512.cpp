// AVX-512 with VNNI: servers since Cascade Lake and Zen 4.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#include "simd.h"

namespace kvgraph {
namespace {

constexpr int kRows = 6, kColumns = 4, kMixHeads = 4, kMixColumns = 4, kIntegerRows = 16, kFloatRows = 14;

inline Floats load_half(const uint8_t* from) {
    return (Floats)(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
inline void store_half(uint16_t* to, Floats values) {
    const __m256i halves = _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
inline Ints load_codes(const int8_t* from) {
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline float sum_lanes(Floats value) { return _mm512_reduce_add_ps((__m512)value); }
inline float largest_lane(Floats value) { return _mm512_reduce_max_ps((__m512)value); }
inline int32_t sum_lanes(Ints value) { return _mm512_reduce_add_epi32((__m512i)value); }

// The sum of each of sixteen values, by adding halves of pairs of them.
inline Floats sum_each(const Floats* values) {
    __m512 pairs[8], fours[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const __m512 a = (__m512)values[2 * i], b = (__m512)values[2 * i + 1];
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    // Each quarter of fours[i] has parts of the same four sums.
    auto fold = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    return (Floats)fold(fold(fours[0], fours[1]), fold(fours[2], fours[3]));
}

inline __m512i load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }

inline __m512 load_scales(const uint8_t* from, bool half) {
    if (half) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_loadu_ps(from);
}

// Eight registers of unsigned weights: 16 columns x 4 inputs each, 32 inputs in all.
inline void nibbles(const uint8_t* from, __m512i* weights) {
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 16
    for (int g = 0; g < 4; ++g) {
        const __m512i pair = load_bytes(from + g * 64);
        weights[2 * g] = _mm512_and_si512(pair, low);
        weights[2 * g + 1] = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low);
    }
}
inline void signed_bytes(const uint8_t* from, __m512i* weights) {
#pragma GCC unroll 16
    for (int g = 0; g < 8; ++g) {
        // w + 128: the product wants one unsigned side.
        weights[g] = _mm512_xor_si512(load_bytes(from + g * 64), _mm512_set1_epi8(-128));
    }
}

inline __m512i add_products(__m512i sum, const __m512i* weights, const int8_t* input) {
#pragma GCC unroll 16
    for (int g = 0; g < 8; ++g) {
        int32_t four;
        std::memcpy(&four, input + g * 4, sizeof four);
        sum = _mm512_dpbusd_epi32(sum, weights[g], _mm512_set1_epi32(four));
    }
    return sum;
}

// Scales a block of weights, or a panel: the sum of each block is scaled and added.
template <Format format, int rows>
void block_rows(bool half, const Rounded& in, int64_t first, const uint8_t* panel, float* tile) {
    constexpr bool four = format == Format::kInt4 || format == Format::kUint4;
    __m512 sum[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) sum[r] = _mm512_setzero_ps();
    const uint8_t* at = panel + (format == Format::kInt8 ? 64 : 0);
    for (int64_t b = 0; b < in.blocks; ++b) {
        __m512i weights[8], zero_points = _mm512_setzero_si512();
        __m512 scale = _mm512_set1_ps(1.0f);
        if constexpr (format != Format::kInt8) {
            scale = load_scales(at, half);
            at += half ? 32 : 64;
        }
        if constexpr (format == Format::kUint4) {
            zero_points = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
            at += 16;
        }
        if constexpr (four)
            nibbles(at, weights);
        else
            signed_bytes(at, weights);
        at += four ? 256 : 512;
        for (int line = 0; line < (four ? 5 : 9); ++line) prefetch(at + kAhead + line * 64);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            const int64_t row = first * in.blocks + b * rows + r;
            const int32_t inputs = in.sums[row];
            __m512i dots;
            if constexpr (format == Format::kUint4) {
                dots = _mm512_mullo_epi32(zero_points, _mm512_set1_epi32(-inputs));
            } else {
                dots = _mm512_set1_epi32(format == Format::kInt4 ? -8 * inputs : -128 * inputs);
            }
            dots = add_products(dots, weights, in.values + (first * in.blocks + b * rows + r) * kBlock);
            __m512 factor = _mm512_set1_ps(in.scales[row]);
            if constexpr (format != Format::kInt8) factor = _mm512_mul_ps(factor, scale);
            sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), factor, sum[r]);
        }
    }
    const __m512 columns = format == Format::kInt8 ? _mm512_loadu_ps(panel) : _mm512_set1_ps(1.0f);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) _mm512_storeu_ps(tile + r * 16, _mm512_mul_ps(sum[r], columns));
}

// INT8 with one scale a column and one a row: exact in integers to the end.
template <int rows>
void whole_rows(const Rounded& in, int64_t first, const uint8_t* panel, float* tile) {
    __m512i dots[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) dots[r] = _mm512_set1_epi32(-128 * in.sums[first + r]);
    for (int64_t b = 0; b < in.blocks; ++b) {
        __m512i weights[8];
        const uint8_t* at = panel + 64 + b * 512;
        signed_bytes(at, weights);
        for (int line = 0; line < 8; ++line) prefetch(at + kAhead + line * 64);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            dots[r] = add_products(dots[r], weights, in.values + (first * in.blocks + b * rows + r) * kBlock);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(panel), _mm512_set1_ps(in.scales[first + r]));
        _mm512_storeu_ps(tile + r * 16, _mm512_mul_ps(_mm512_cvtepi32_ps(dots[r]), scale));
    }
}

template <int rows>
void integer_rows(const Packing& packing, const Rounded& in, int64_t first, const uint8_t* panel,
                  float* tile) {
    const bool half = packing.half_scales;
    switch (packing.format) {
        case Format::kInt4:
            return block_rows<Format::kInt4, rows>(half, in, first, panel, tile);
        case Format::kUint4:
            return block_rows<Format::kUint4, rows>(half, in, first, panel, tile);
        case Format::kInt8Block:
            return block_rows<Format::kInt8Block, rows>(half, in, first, panel, tile);
        default:
            if (in.whole_rows) return whole_rows<rows>(in, first, panel, tile);
            return block_rows<Format::kInt8, rows>(half, in, first, panel, tile);
    }
}

}  // namespace
}  // namespace kvgraph

#include "kernel_table.h"

namespace kvgraph {
constexpr Kernels kAvx512Kernels = kernel_table("avx512-vnni");
}  // namespace kvgraph
#endif
