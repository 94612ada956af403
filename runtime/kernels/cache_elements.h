// What a cache is made of, sixteen elements at a time, for the target that the including file has set. That
// file also defines `load_codes` (sixteen int8 as Ints) and `store_half`.
#pragma once

#include <cstring>
#include <type_traits>

#include "attention.h"
#include "simd.h"

namespace kvgraph {
namespace {

struct Float32Element {
    using Stored = float;
    static Floats read(const Stored* from) { return load(from); }
    static void write(Stored* to, Floats values) { store(to, values); }
};

struct Float16Element {
    using Stored = uint16_t;
    static Floats read(const Stored* from) { return load_half(reinterpret_cast<const uint8_t*>(from)); }
    static void write(Stored* to, Floats values) { store_half(to, values); }
};

inline void store_codes(void* to, Ints codes) {
    const Bytes bytes = __builtin_convertvector(codes, Bytes);
    std::memcpy(to, &bytes, sizeof bytes);
}

struct Int8Element {
    using Stored = int8_t;
    static Floats read(const Stored* from) { return __builtin_convertvector(load_codes(from), Floats); }
    static void write(Stored* to, Floats values) {
        store_codes(to, nearest(larger(smaller(values, all(127.0f)), all(-128.0f))));
    }
};

// E4M3: a sign, four bits of exponent with a bias of 7, three of fraction, no infinity. The smallest are
// multiples of 2^-9; nothing here goes through a denormal float, which threads of the runtime take for zero.
struct Float8Element {
    using Stored = uint8_t;
    static Floats read(const Stored* from) {
        const Ints codes = load_codes(reinterpret_cast<const int8_t*>(from)), size = codes & 127;
        const Floats normal = from_bits((size << 20) + (120 << 23));
        const Floats small = __builtin_convertvector(size, Floats) * (1.0f / 512);
        const Ints found = bits(choose(size < 8, small, normal)) | (codes & INT32_MIN);
        return choose(size == 127, all(__builtin_nanf("")), from_bits(found));
    }
    static void write(Stored* to, Floats values) {
        const Floats size = smaller(magnitude(values), all(448.0f));
        const Floats shift = all(16384.0f);  // whose last bit is 2^-9
        const Ints small = bits(size + shift) - bits(shift), wide = bits(size);
        const Ints normal = ((wide + 0x7ffff + ((wide >> 20) & 1)) >> 20) - (120 << 3);
        const Ints codes = bits(choose(size < 1.0f / 64, from_bits(small), from_bits(normal)));
        const Ints sign = (bits(values) >> 24) & 128;
        store_codes(to, (Ints)choose(values == values, from_bits(codes | sign), from_bits(sign | 127)));
    }
};

template <class Element>
inline Floats read_some(const typename Element::Stored* from, int64_t count) {
    typename Element::Stored some[16] = {};
    std::memcpy(some, from, static_cast<size_t>(count) * sizeof *from);
    return Element::read(some);
}

template <class Element>
inline Floats read(const typename Element::Stored* from, int64_t count) {
    return count >= 16 ? Element::read(from) : read_some<Element>(from, count);
}

// Elements as floats.
template <class Element>
void decode(const typename Element::Stored* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store(to + i, Element::read(from + i));
    if (i == count) return;
    const Floats rest = read_some<Element>(from + i, count - i);
    std::memcpy(to + i, &rest, static_cast<size_t>(count - i) * sizeof *to);
}

inline Floats load_some(const float* from, int64_t count, float other) {
    Floats values = all(other);
    std::memcpy(&values, from, static_cast<size_t>(count < 16 ? count : 16) * sizeof *from);
    return values;
}

template <class Element>
void encode(const float* from, const float* scale, const float* offset, int64_t size, void* to) {
    auto* stored = static_cast<typename Element::Stored*>(to);
    for (int64_t i = 0; i < size; i += 16) {
        const int64_t count = size - i < 16 ? size - i : 16;
        Floats values = load_some(from + i, count, 0.0f);
        if (offset != nullptr) values -= load_some(offset + i, count, 0.0f);
        if (scale != nullptr) values /= load_some(scale + i, count, 1.0f);
        typename Element::Stored codes[16];
        Element::write(codes, values);
        std::memcpy(stored + i, codes, static_cast<size_t>(count) * sizeof *stored);
    }
}

// Codes of the keys of some slots, as floats [slots, size], to keys, in place.
void form_keys(const KeyForm& form, int64_t slot, int64_t slots, int64_t size, float* keys) {
    const int64_t apart = form.interleaved ? 1 : form.half, along = form.interleaved ? 2 : 1;
    for (int64_t j = 0; j < slots; ++j) {
        float* key = keys + j * size;
        int64_t d = 0;
        for (; d + 16 <= size; d += 16) {
            store(key + d, load(key + d) * load(form.scale + d) + load(form.offset + d));
        }
        for (; d < size; ++d) key[d] = key[d] * form.scale[d] + form.offset[d];
        if (form.cos == nullptr) continue;
        const float* cosines = form.cos + (slot + j) * form.half;
        const float* sines = form.sin + (slot + j) * form.half;
        int64_t i = 0;
        for (; i + 16 <= form.half && !form.interleaved; i += 16) {
            const Floats first = load(key + i), second = load(key + form.half + i);
            const Floats cos = load(cosines + i), sin = load(sines + i);
            store(key + i, first * cos - second * sin);
            store(key + form.half + i, second * cos + first * sin);
        }
        for (; i < form.half; ++i) {
            float* pair = key + i * along;
            const float first = pair[0], second = pair[apart];
            pair[0] = first * cosines[i] - second * sines[i];
            pair[apart] = second * cosines[i] + first * sines[i];
        }
    }
}

// The same from the codes at once, where halves are whole registers: nothing is stored in between.
template <class Element>
void decode_keys(const typename Element::Stored* codes, const KeyForm& form, int64_t slot, int64_t slots,
                 int64_t size, float* keys) {
    auto key = [&](const typename Element::Stored* from, int64_t d) {
        return Element::read(from + d) * load(form.scale + d) + load(form.offset + d);
    };
    for (int64_t j = 0; j < slots; ++j) {
        const auto* from = codes + (slot + j) * size;
        float* to = keys + j * size;
        const float* cosines = form.cos + (slot + j) * form.half;
        const float* sines = form.sin + (slot + j) * form.half;
        for (int64_t i = 0; i < form.half; i += 16) {
            const Floats first = key(from, i), second = key(from, form.half + i);
            const Floats cos = load(cosines + i), sin = load(sines + i);
            store(to + i, first * cos - second * sin);
            store(to + form.half + i, second * cos + first * sin);
        }
        for (int64_t d = 2 * form.half; d < size; d += 16) store(to + d, key(from, d));
    }
}

// Keys of some slots as floats: where they lie, or in `block`.
template <class Element>
const float* keys_of(const typename Element::Stored* keys, const KeyForm* form, int64_t slot, int64_t slots,
                     int64_t size, float* block) {
    if constexpr (std::is_same_v<Element, Float32Element>) {
        if (form == nullptr) return keys + slot * size;
    }
    if (form != nullptr && form->cos != nullptr && !form->interleaved && form->half % 16 == 0 &&
        size % 16 == 0) {
        decode_keys<Element>(keys, *form, slot, slots, size, block);
        return block;
    }
    decode<Element>(keys + slot * size, slots * size, block);
    if (form != nullptr) form_keys(*form, slot, slots, size, block);
    return block;
}

// Values of some slots as floats, [slots, padded size].
template <class Element>
const float* values_of(const typename Element::Stored* values, int64_t slots, int64_t size, float* rows) {
    const int64_t padded = padded_size(size);
    if constexpr (std::is_same_v<Element, Float32Element>) {
        if (padded == size) return values;
    }
    for (int64_t j = 0; j < slots; ++j) decode<Element>(values + j * size, size, rows + j * padded);
    return rows;
}

}  // namespace
}  // namespace kvgraph
