// AMX multiplies bfloat16 sixteen times as fast as AVX-512 multiplies float32, and adds in float32. A float32
// is the exact sum of three bfloat16, so a product of floats is one of up to six of their parts: three where
// the weights are bfloat16 themselves.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels.h"

#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#include "simd.h"

namespace kvgraph {
namespace {

constexpr int64_t kTileNumbers = kSplitRows * kBlock;  // bfloat16 of a tile: 16 rows of 64 bytes

struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {};
    uint8_t lines[16] = {};

    Shapes() {
        // 0 ... 3 sums, 4 and 5 inputs, 6 and 7 weights.
        for (int tile = 0; tile < 8; ++tile) {
            line_bytes[tile] = 64;
            lines[tile] = kSplitRows;
        }
    }
};

// The part of sixteen numbers that bfloat16 holds, cut and not rounded, so that three of them leave nothing.
inline Halves cut(Floats numbers, Floats& rest) {
    const Ints kept = bits(numbers) & static_cast<int32_t>(0xffff0000);
    rest = numbers - from_bits(kept);
    return __builtin_convertvector((kept >> 16) & 0xffff, Halves);
}

inline Floats load_some(const float* from, int64_t count) {
    const __mmask16 mask = count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
    return (Floats)_mm512_maskz_loadu_ps(mask, from);
}

void split_row(const float* row, int64_t size, uint16_t* to) {
    for (int64_t k = 0; k < size; k += kBlock, to += kSplitParts * kTileNumbers) {
        for (int64_t half = 0; half < kBlock; half += 16) {
            Floats rest = load_some(row + k + half, size - k - half);
            for (int part = 0; part < kSplitParts; ++part) {
                const Halves kept = cut(rest, rest);
                std::memcpy(to + part * kTileNumbers + half, &kept, sizeof kept);
            }
        }
    }
}

inline Floats weights_at(Format format, const uint8_t* panel, int64_t k) {
    if (format == Format::kFloat32) return load(reinterpret_cast<const float*>(panel) + k * kPanel);
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + k * 32)));
}

// Weights k and k + 1 of each column side by side, which is what a line of a tile holds.
inline __m512i beside(__m256i even, __m256i odd) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

void split_panel(Format format, const uint8_t* panel, int64_t size, uint16_t* to) {
    const int parts = split_parts(format);
    for (int64_t k = 0; k < size; k += 2) {
        uint16_t* line = to + k / kBlock * parts * kTileNumbers + k % kBlock * kPanel;
        const bool both = k + 1 < size;
        if (format == Format::kBFloat16) {
            const auto* pair = reinterpret_cast<const __m256i*>(panel + k * 32);
            const __m256i odd = both ? _mm256_loadu_si256(pair + 1) : _mm256_setzero_si256();
            _mm512_storeu_si512(line, beside(_mm256_loadu_si256(pair), odd));
            continue;
        }
        Floats even = weights_at(format, panel, k), odd = both ? weights_at(format, panel, k + 1) : Floats{};
        for (int part = 0; part < parts; ++part) {
            const Halves left = cut(even, even), right = cut(odd, odd);
            _mm512_storeu_si512(line + part * kTileNumbers, beside((__m256i)left, (__m256i)right));
        }
    }
    // What is left of the last block.
    const int64_t padded = (size + kBlock - 1) / kBlock * kBlock;
    for (int64_t k = (size + 1) / 2 * 2; k < padded; k += 2) {
        uint16_t* line = to + k / kBlock * parts * kTileNumbers + k % kBlock * kPanel;
        for (int part = 0; part < parts; ++part) std::memset(line + part * kTileNumbers, 0, 64);
    }
}

// Four sums take turns, so that none waits for its last product. Parts whose product is below the last digit
// of the sum are left out.
template <int rows, int columns>
void multiply(const SplitProduct& product, const float* start) {
    _tile_zero(0);
    if (columns > 1) _tile_zero(1);
    if (rows > 1) _tile_zero(2);
    if (rows > 1 && columns > 1) _tile_zero(3);
    if (start != nullptr) {
        _tile_loadd(0, start, 64);
        if (columns > 1) _tile_loadd(1, start + product.panel_step, 64);
        if (rows > 1) _tile_loadd(2, start + kSplitRows * kPanel, 64);
        if (rows > 1 && columns > 1) _tile_loadd(3, start + kSplitRows * kPanel + product.panel_step, 64);
    }
    const uint16_t* left = product.input;
    const uint16_t* right = product.weights;
    for (int64_t b = 0; b < product.blocks; ++b) {
        for (int w = 0; w < product.parts; ++w, right += kTileNumbers) {
            _tile_loadd(6, right, 64);
            if (columns > 1) _tile_loadd(7, right + product.weights_step, 64);
            for (int i = 0; i + w < kSplitParts; ++i) {
                _tile_loadd(4, left + i * kTileNumbers, 64);
                _tile_dpbf16ps(0, 4, 6);
                if (columns > 1) _tile_dpbf16ps(1, 4, 7);
                if (rows > 1) {
                    _tile_loadd(5, left + i * kTileNumbers + product.input_step, 64);
                    _tile_dpbf16ps(2, 5, 6);
                    if (columns > 1) _tile_dpbf16ps(3, 5, 7);
                }
            }
        }
        left += kSplitParts * kTileNumbers;
    }
    _tile_stored(0, product.tile, 64);
    if (columns > 1) _tile_stored(1, product.tile + product.panel_step, 64);
    if (rows > 1) _tile_stored(2, product.tile + kSplitRows * kPanel, 64);
    if (rows > 1 && columns > 1) _tile_stored(3, product.tile + kSplitRows * kPanel + product.panel_step, 64);
}

void split_multiply(const SplitProduct& product) {
    static const Shapes shapes;
    _tile_loadconfig(&shapes);
    const float* start = product.add ? product.tile : nullptr;
    if (product.row_tiles > 1) {
        if (product.panels > 1)
            multiply<2, 2>(product, start);
        else
            multiply<2, 1>(product, start);
    } else if (product.panels > 1) {
        multiply<1, 2>(product, start);
    } else {
        multiply<1, 1>(product, start);
    }
    _tile_release();
}

}  // namespace

const SplitKernels kAmxSplitKernels = {split_row, split_panel, split_multiply};

}  // namespace kvgraph
#endif
