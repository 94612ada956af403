// Arithmetic for weights on their way to a file: every operation is rounded as IEEE 754 and NumPy have it, so
// nothing is fused or reordered. Sixteen floats are one value. Included by each file of loops after it has
// set its target, so everything here has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "weight_kernels.h"

#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace kvgraph {
namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

template <class Value>
inline Value load(const void* from) {
    Value value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class Value>
inline void store(void* to, Value value) {
    std::memcpy(to, &value, sizeof value);
}

inline Floats all(float value) { return value - Floats{}; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
inline Floats magnitude(Floats value) { return (Floats)((Words)value & 0x7fffffff); }

// To the nearest integer, ties to even, where |value| < 2 ** 22: the sum has no bits for a fraction.
constexpr float kMagic = 12582912.0f;
inline Floats nearest(Floats value) { return (value + kMagic) - kMagic; }
// The low byte of such an integer.
inline Bytes low_bytes(Floats integer) {
    // In two steps, each one instruction: for both at once GCC 12 takes the lanes one by one.
    const Shorts shorts = __builtin_convertvector((Words)(integer + kMagic), Shorts);
    return __builtin_convertvector(shorts, Bytes);
}

inline Floats from_half(Words half) {
    const Words exponent = half & 0x7c00, sign = (half & 0x8000) << 16;
    const Words normal =
        ((half & 0x7fff) << 13) + (exponent == 0x7c00 ? Words{} + (224u << 23) : Words{} + (112u << 23));
    // By way of integers: numbers that are too small to be normal may be flushed to zero.
    const Floats subnormal = __builtin_convertvector((Ints)(half & 0x3ff), Floats) * 0x1p-24f;
    return (Floats)((exponent == 0 ? (Words)subnormal : normal) | sign);
}

inline Floats load_floats(const uint8_t* from, Type type) {
    if (type == Type::kFloat32) return load<Floats>(from);
    const Words bits = __builtin_convertvector(load<Shorts>(from), Words);
    return type == Type::kBFloat16 ? (Floats)(bits << 16) : from_half(bits);
}

inline Floats to_bfloat16(Floats value) {
    const Words bits = (Words)value;
    return (Floats)((bits + (0x7fff + ((bits >> 16) & 1))) & 0xffff0000);
}

inline Floats to_float16(Floats value) {
    const Words bits = (Words)value & 0x7fffffff, sign = (Words)value & 0x80000000;
    const Floats normal = (Floats)((bits + (0xfff + ((bits >> 13) & 1))) & 0xffffe000);
    // Multiples of 2 ** -24: what one more bit of 0.75 is.
    const Floats subnormal = (magnitude(value) + 0.75f) - 0.75f;
    Floats found = magnitude(value) < 0x1p-14f ? subnormal : normal;
    found = found > 65504.0f ? all(__builtin_inff()) : found;
    return (Floats)((Words)found | sign);
}

// Rounded to a type, to nearest and ties to even.
inline Floats round_to(Floats value, Type type) {
    if (type == Type::kFloat32) return value;
    return type == Type::kBFloat16 ? to_bfloat16(value) : to_float16(value);
}

}  // namespace
}  // namespace kvgraph
