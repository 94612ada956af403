// AMX: products of 16 rows of input with 16 columns of weights in one instruction. The panels of
// `packed_linear.h` are its operands as they lie in memory: 4 inputs x 16 columns a line.
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels.h"

#pragma GCC target("amx-tile,amx-int8,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#include "simd.h"

namespace kvgraph {
namespace {

constexpr int kRowTiles = 4, kTile = 16;  // rows of the input: 4 tiles of 16
constexpr int kFewRows = 12;              // up to here AVX-512 is faster
constexpr int64_t kBlockBytes = kBlock * kPanel;

// Tiles of one or two blocks of inputs: 0 ... 3 sums of 32 bits, 4 and 5 weights, 6 and 7 inputs.
struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {};
    uint8_t lines[16] = {};

    explicit Shapes(int blocks) {
        for (int tile = 0; tile < 8; ++tile) {
            line_bytes[tile] = static_cast<uint16_t>(tile < 6 ? 64 : blocks * kBlock);
            lines[tile] = static_cast<uint8_t>(tile == 4 || tile == 5 ? blocks * kBlock / 4 : kTile);
        }
    }
};

inline __m512 load_scales(const uint8_t* from, bool half) {
    if (half) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_loadu_ps(from);
}

// The signed bytes of a 4-bit block; `zero` is subtracted from each code.
inline void unpack(const uint8_t* from, __m512i zero, uint8_t* to) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int g = 0; g < 4; ++g) {
        const __m512i pair = _mm512_loadu_si512(from + g * 64);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low);
        _mm512_store_si512(to + g * 128, _mm512_sub_epi8(_mm512_and_si512(pair, low), zero));
        _mm512_store_si512(to + g * 128 + 64, _mm512_sub_epi8(high, zero));
    }
}

// Adds the products of two blocks to one tile of sums for each tile of rows, whose lines are `line` apart.
template <int tiles>
inline void add_pair(const uint8_t* weights, const int8_t* inputs, int64_t line) {
    _tile_loadd(4, weights, 64);
    _tile_loadd(6, inputs, line);
    _tile_dpbssd(0, 6, 4);
    if constexpr (tiles > 1) {
        _tile_loadd(7, inputs + kTile * line, line);
        _tile_dpbssd(1, 7, 4);
    }
    if constexpr (tiles > 2) {
        _tile_loadd(6, inputs + 2 * kTile * line, line);
        _tile_dpbssd(2, 6, 4);
    }
    if constexpr (tiles > 3) {
        _tile_loadd(7, inputs + 3 * kTile * line, line);
        _tile_dpbssd(3, 7, 4);
    }
}

// INT8 with one scale a column and one a row: sums of 32 bits to the end.
template <int tiles>
void whole_rows(const Rounded& in, int64_t first, int count, const uint8_t* panel, float* tile) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int8_t* inputs = in.values + first * in.blocks * kBlock;
    const uint8_t* weights = panel + kPanel * sizeof(float);
    for (int64_t pair = 0; pair < in.blocks / 2; ++pair) {
        add_pair<tiles>(weights, inputs, 2 * kBlock);
        weights += 2 * kBlockBytes;
        inputs += 2 * kBlock * count;
    }
    if (in.blocks % 2 != 0) {
        // Beside zeros, with which whatever is behind the inputs of a row is multiplied.
        alignas(64) uint8_t last[2 * kBlockBytes] = {};
        std::memcpy(last, weights, kBlockBytes);
        add_pair<tiles>(last, inputs, kBlock);
    }
    alignas(64) int32_t sums[kRowTiles * kTile][kPanel];
    _tile_stored(0, sums[0], 64);
    if constexpr (tiles > 1) _tile_stored(1, sums[kTile], 64);
    if constexpr (tiles > 2) _tile_stored(2, sums[2 * kTile], 64);
    if constexpr (tiles > 3) _tile_stored(3, sums[3 * kTile], 64);
    const __m512 columns = _mm512_loadu_ps(panel);
    for (int r = 0; r < count; ++r) {
        const __m512 scale = _mm512_mul_ps(columns, _mm512_set1_ps(in.scales[first + r]));
        _mm512_storeu_ps(tile + r * kPanel,
                         _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums[r])), scale));
    }
}

// Adds the products of up to four blocks, each with the scales of its weights and its inputs, to 16 rows.
inline void add_blocks(int blocks, const int8_t* values, const float* scales, int count,
                       const uint8_t* weights, const __m512* columns, float* tile) {
    alignas(64) int32_t products[4][kTile][kPanel];
    const int64_t step = count * kBlock;
    _tile_loadd(4, weights, 64);
    _tile_loadd(6, values, kBlock);
    _tile_zero(0);
    _tile_dpbssd(0, 6, 4);
    if (blocks > 1) {
        _tile_loadd(5, weights + kBlockBytes, 64);
        _tile_loadd(7, values + step, kBlock);
        _tile_zero(1);
        _tile_dpbssd(1, 7, 5);
    }
    if (blocks > 2) {
        _tile_loadd(4, weights + 2 * kBlockBytes, 64);
        _tile_loadd(6, values + 2 * step, kBlock);
        _tile_zero(2);
        _tile_dpbssd(2, 6, 4);
    }
    if (blocks > 3) {
        _tile_loadd(5, weights + 3 * kBlockBytes, 64);
        _tile_loadd(7, values + 3 * step, kBlock);
        _tile_zero(3);
        _tile_dpbssd(3, 7, 5);
    }
    _tile_stored(0, products[0], 64);
    if (blocks > 1) _tile_stored(1, products[1], 64);
    if (blocks > 2) _tile_stored(2, products[2], 64);
    if (blocks > 3) _tile_stored(3, products[3], 64);
#pragma GCC unroll 16
    for (int r = 0; r < kTile; ++r) {
        __m512 sum = _mm512_load_ps(tile + r * kPanel);
        for (int b = 0; b < blocks; ++b) {
            const __m512 factor = _mm512_mul_ps(columns[b], _mm512_set1_ps(scales[b * count + r]));
            sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(products[b][r])), factor, sum);
        }
        _mm512_store_ps(tile + r * kPanel, sum);
    }
}

void block_rows(const Packing& packing, const Rounded& in, int64_t first, int count, const uint8_t* panel,
                float* tile) {
    const Format format = packing.format;
    const int tiles = (count + kTile - 1) / kTile;
    for (int r = 0; r < tiles * kTile; ++r) _mm512_store_ps(tile + r * kPanel, _mm512_setzero_ps());
    const int64_t scale_bytes = format == Format::kInt8 ? 0 : packing.half_scales ? 32 : 64;
    alignas(64) uint8_t unpacked[4 * kBlockBytes];
    for (int64_t b = 0; b < in.blocks; b += 4) {
        const int blocks = in.blocks - b < 4 ? static_cast<int>(in.blocks - b) : 4;
        __m512 columns[4];
        for (int i = 0; i < blocks; ++i) {
            const uint8_t* at = panel + (format == Format::kInt8 ? 64 : 0) + (b + i) * packing.block_bytes();
            columns[i] = load_scales(format == Format::kInt8 ? panel : at, packing.half_scales);
            at += scale_bytes;
            uint8_t* to = unpacked + i * kBlockBytes;
            if (format == Format::kInt4) {
                unpack(at, _mm512_set1_epi8(8), to);
            } else if (format == Format::kUint4) {
                const __m128i points = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
                const __m512i each =
                    _mm512_mullo_epi32(_mm512_cvtepu8_epi32(points), _mm512_set1_epi32(0x01010101));
                unpack(at + 16, each, to);
            } else {
                std::memcpy(to, at, kBlockBytes);
            }
        }
        for (int t = 0; t < tiles; ++t) {
            const int64_t row = first * in.blocks + b * count + t * kTile;
            const int8_t* values = in.values + row * kBlock;
            float* to = tile + t * kTile * kPanel;
            if (blocks == 4)
                add_blocks(4, values, in.scales + row, count, unpacked, columns, to);
            else
                add_blocks(blocks, values, in.scales + row, count, unpacked, columns, to);
        }
    }
}

void integer_tile(const Packing& packing, const Rounded& in, int64_t first, int count, const uint8_t* panel,
                  float* tile) {
    if (count <= kFewRows) return kAvx512Kernels.integer_tile(packing, in, first, count, panel, tile);
    static const Shapes one_block(1), two_blocks(2);
    _tile_loadconfig(in.whole_rows ? &two_blocks : &one_block);
    if (!in.whole_rows) {
        block_rows(packing, in, first, count, panel, tile);
    } else {
        switch ((count + kTile - 1) / kTile) {
            case 1:
                whole_rows<1>(in, first, count, panel, tile);
                break;
            case 2:
                whole_rows<2>(in, first, count, panel, tile);
                break;
            case 3:
                whole_rows<3>(in, first, count, panel, tile);
                break;
            default:
                whole_rows<4>(in, first, count, panel, tile);
        }
    }
    _tile_release();
}

}  // namespace

namespace {
constexpr unsigned kAmxBFloat16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;

bool has_features(unsigned features) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & features) == features;
}
}  // namespace

// Linux gives the tiles' registers to processes that ask for them.
bool amx_available() {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return has_features(kAmxTile | kAmxInt8) && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

Kernels amx_kernels() {
    Kernels table = kAvx512Kernels;
    table.name = "amx-int8";
    table.rows = kRowTiles * kTile;
    table.wide_rows = kFewRows + 1;
    table.integer_tile = integer_tile;
    if (has_features(kAmxBFloat16)) table.split = &kAmxSplitKernels;
    return table;
}

}  // namespace kvgraph
#endif
