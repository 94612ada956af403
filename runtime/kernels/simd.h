// Sixteen floats as one value, whatever the registers: GCC and Clang cut it to fit. Included by each file of
// kernels after it has set its target, so everything here has internal linkage. That file also defines, for
// its registers, `load_half` and `store_half` (sixteen float16 numbers), `load_codes` (sixteen int8, as
// Ints), `sum_lanes`, `sum_each` (of sixteen values) and `largest_lane`.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvgraph {

// Whether kernels ask for what they will read soon. Measured: a decode step in 4 bits takes a fifth less time
// with it on Sapphire Rapids, and a third more on Zen 4, whose own prefetching it gets in the way of.
extern const bool kFetchesAhead;

namespace {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

inline Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

// What is read once is fetched so many bytes ahead, into the second-level cache: it waits for more lines at a
// time than the first.
constexpr int64_t kAhead = 4096;
inline void prefetch(const void* line) {
    if (kFetchesAhead) __builtin_prefetch(line, 0, 2);
}

inline Floats all(float value) { return value - Floats{}; }

inline Ints bits(Floats value) { return (Ints)value; }
inline Floats from_bits(Ints value) { return (Floats)value; }
inline Floats choose(Ints mask, Floats yes, Floats no) {
    return from_bits((mask & bits(yes)) | (~mask & bits(no)));
}
inline Floats larger(Floats a, Floats b) { return choose(a > b, a, b); }
inline Floats smaller(Floats a, Floats b) { return choose(a < b, a, b); }
inline Floats magnitude(Floats value) { return from_bits(bits(value) & 0x7fffffff); }

// Nearest integers, halves to even, of numbers below 2^22: the sum with 1.5 * 2^23 has no bits left for a
// fraction.
inline Ints nearest(Floats value) {
    const Floats shift = all(12582912.0f);
    return bits(value + shift) - bits(shift);
}

// e^x = 2^n e^r with |r| <= ln(2) / 2, and the series of e^r up to its sixth power: within 2 units in the
// last place.
inline Floats exponential(Floats x) {
    x = larger(smaller(x, all(88.3f)), all(-87.3f));
    const Ints n = nearest(x * 1.44269504f);
    const Floats whole = __builtin_convertvector(n, Floats);
    const Floats r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    Floats p = all(1.0f / 720);
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * from_bits((n + 127) << 23);
}

// tanh(x) = 1 - 2 / (e^2x + 1); near zero, where that cancels, the series.
inline Floats hyperbolic_tangent(Floats x) {
    const Floats square = x * x;
    const Floats series = x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315))));
    return choose(magnitude(x) < 0.1f, series, 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f));
}

}  // namespace
}  // namespace kvgraph
