// Reading memory and nothing else: the yardstick of what products read. Called through ctypes.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "simd.h"

namespace kvgraph {
namespace {

typedef uint64_t Words __attribute__((vector_size(64)));

// Streams that one thread reads side by side: with one, the hardware's own prefetching starts anew at every
// page. Each is fetched ahead as the products' are.
constexpr int64_t kStreams = 4;
constexpr int64_t kStep = 256;

// Inlined into a function of each target: vectors are cut to its registers.
__attribute__((always_inline)) inline uint64_t read_all(const uint8_t* from, int64_t bytes) {
    const int64_t part = bytes / kStreams / kStep * kStep;
    Words sums[kStep / 64] = {};
    for (int64_t at = 0; at < part; at += kStep) {
        for (int64_t stream = 0; stream < kStreams; ++stream) {
            const uint8_t* line = from + stream * part + at;
            for (int64_t i = 0; i < kStep / 64; ++i, line += 64) {
                prefetch(line + kAhead);
                Words words;
                std::memcpy(&words, line, sizeof words);
                sums[i] ^= words;
            }
        }
    }
    uint64_t result = 0;
    for (const Words& sum : sums) {
        for (int lane = 0; lane < 8; ++lane) result ^= sum[lane];
    }
    for (int64_t at = kStreams * part; at < bytes; at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, from + at, std::min<int64_t>(8, bytes - at));
        result ^= word;
    }
    return result;
}

uint64_t read_generic(const uint8_t* from, int64_t bytes) { return read_all(from, bytes); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) uint64_t read_avx2(const uint8_t* from, int64_t bytes) {
    return read_all(from, bytes);
}
__attribute__((target("avx512f"))) uint64_t read_avx512(const uint8_t* from, int64_t bytes) {
    return read_all(from, bytes);
}
#endif

}  // namespace
}  // namespace kvgraph

// Exclusive or of the 64-bit words of `bytes` bytes, the last one filled up with zeros: it depends on all of
// them.
extern "C" __attribute__((visibility("default"))) uint64_t kvgraph_read_memory(const uint8_t* from,
                                                                               int64_t bytes) {
    using namespace kvgraph;
#if defined(__x86_64__)
    const Kernels* table = &kernels();
    if (table == &kAvx2Kernels) return read_avx2(from, bytes);
    if (table != &kGenericKernels) return read_avx512(from, bytes);
#endif
    return read_generic(from, bytes);
}
