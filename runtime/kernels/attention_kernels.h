// Attention in float32 for the target that the including file has set, over a cache of any type.
#pragma once

#include <cmath>

#include "attention.h"
#include "cache_elements.h"
#include "simd.h"

namespace kvgraph {
namespace {

// Elements of a line of the processor's cache, and those that are fetched ahead.
template <class Element>
constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(typename Element::Stored));
template <class Element>
constexpr int64_t kAheadElements = kAhead / 64 * kLine<Element>;
constexpr float kUnseen = -1e30f;  // a score that softmax makes zero; not infinite, whose difference is NaN

inline Floats cap(Floats scores, float softcap) {
    return softcap == 0 ? scores : softcap * hyperbolic_tangent(scores / softcap);
}

// c[r][16 lanes * columns] (+)= sum over k of a[r * a_row + k * a_step] * b[k * b_row + lanes].
template <int rows, int columns, bool add>
void multiply(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row, int64_t depth,
              float* c, int64_t c_row) {
    Floats sum[rows][columns];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
        for (int n = 0; n < columns; ++n) sum[r][n] = add ? load(c + r * c_row + n * 16) : Floats{};
    }
    for (int64_t k = 0; k < depth; ++k) {
        Floats right[columns];
#pragma GCC unroll 16
        for (int n = 0; n < columns; ++n) right[n] = load(b + k * b_row + n * 16);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            const float left = a[r * a_row + k * a_step];
#pragma GCC unroll 16
            for (int n = 0; n < columns; ++n) sum[r][n] += left * right[n];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
        for (int n = 0; n < columns; ++n) store(c + r * c_row + n * 16, sum[r][n]);
    }
}

template <int rows, int columns, bool add>
void multiply_rows(int64_t count, const float* a, int64_t a_row, int64_t a_step, const float* b,
                   int64_t b_row, int64_t depth, float* c, int64_t c_row) {
    int64_t r = 0;
    for (; r + rows <= count; r += rows) {
        multiply<rows, columns, add>(a + r * a_row, a_row, a_step, b, b_row, depth, c + r * c_row, c_row);
    }
    for (; r < count; ++r) {
        multiply<1, columns, add>(a + r * a_row, a_row, a_step, b, b_row, depth, c + r * c_row, c_row);
    }
}

// All lanes of c, `width` of them (a multiple of 16), in strips of 16 * kColumns.
template <bool add>
void multiply_all(int64_t count, int64_t width, const float* a, int64_t a_row, int64_t a_step, const float* b,
                  int64_t b_row, int64_t depth, float* c, int64_t c_row) {
    int64_t n = 0;
    for (; n + 16 * kColumns <= width; n += 16 * kColumns) {
        multiply_rows<kRows, kColumns, add>(count, a, a_row, a_step, b + n, b_row, depth, c + n, c_row);
    }
    for (; n < width; n += 16) {
        multiply_rows<kRows, 1, add>(count, a, a_row, a_step, b + n, b_row, depth, c + n, c_row);
    }
}

// Scores of one tile of keys, in lanes a row of queries each, to their exponentials. Returns each row's
// factor for what was summed before.
Floats soften(float* scores, int64_t keys, int64_t slot, const int32_t* first, const int32_t* last,
              bool masked, float softcap, Floats& maximum, Floats& sum) {
    Ints low, high;
    std::memcpy(&low, first, sizeof low);
    std::memcpy(&high, last, sizeof high);
    Floats most = maximum;
    for (int64_t j = 0; j < keys; ++j) {
        Floats score = cap(load(scores + j * kTileRows), softcap);
        if (masked) {
            const Ints at = static_cast<int32_t>(slot + j) - Ints{};
            score = choose((at >= low) & (at <= high), score, all(kUnseen));
        }
        store(scores + j * kTileRows, score);
        most = larger(score, most);
    }
    const Floats factor = exponential(maximum - most);
    Floats part = {};
    for (int64_t j = 0; j < keys; ++j) {
        Floats weight = load(scores + j * kTileRows);
        // A row that has seen nothing yet has the score of the unseen as its largest.
        weight = choose(weight > 0.5f * kUnseen, exponential(weight - most), Floats{});
        store(scores + j * kTileRows, weight);
        part += weight;
    }
    maximum = most;
    sum = sum * factor + part;
    return factor;
}

template <class Element>
void attend_tile(const AttendTile& tile) {
    const auto* stored_keys = static_cast<const typename Element::Stored*>(tile.keys);
    const auto* stored_values = static_cast<const typename Element::Stored*>(tile.values);
    const int64_t size = tile.size, padded = padded_size(size), lanes = padded_size(tile.rows);
    int64_t begin = tile.first[0], end = tile.last[0] + 1, all_first = begin, all_last = tile.last[0];
    int32_t first[kTileRows], last[kTileRows];
    for (int64_t r = 0; r < kTileRows; ++r) {
        const int64_t row = r < tile.rows ? r : 0;
        first[r] = static_cast<int32_t>(tile.first[row]);
        last[r] = static_cast<int32_t>(tile.last[row]);
        begin = tile.first[row] < begin ? tile.first[row] : begin;
        end = tile.last[row] >= end ? tile.last[row] + 1 : end;
        all_first = tile.first[row] > all_first ? tile.first[row] : all_first;
        all_last = tile.last[row] < all_last ? tile.last[row] : all_last;
    }
    Floats maximum[kTileRows / 16], sum[kTileRows / 16];
    for (int64_t n = 0; n < kTileRows / 16; ++n) {
        maximum[n] = all(kUnseen);
        sum[n] = Floats{};
    }
    std::memset(tile.result, 0, static_cast<size_t>(tile.rows * padded) * sizeof(float));
    for (int64_t slot = begin; slot < end; slot += kTileKeys) {
        const int64_t keys = end - slot < kTileKeys ? end - slot : kTileKeys;
        const float* left = keys_of<Element>(stored_keys, tile.form, slot, keys, size, tile.block);
        multiply_all<false>(keys, lanes, left, size, 1, tile.queries, kTileRows, size, tile.scores,
                            kTileRows);
        const bool masked = slot < all_first || slot + keys - 1 > all_last;
        float factors[kTileRows];
        for (int64_t n = 0; n < lanes / 16; ++n) {
            store(factors + n * 16, soften(tile.scores + n * 16, keys, slot, first + n * 16, last + n * 16,
                                           masked, tile.softcap, maximum[n], sum[n]));
        }
        for (int64_t r = 0; r < tile.rows; ++r) {
            if (factors[r] == 1.0f) continue;
            for (int64_t d = 0; d < padded; d += 16) {
                store(tile.result + r * padded + d, load(tile.result + r * padded + d) * factors[r]);
            }
        }
        const float* values = values_of<Element>(stored_values + slot * size, keys, size, tile.padded);
        multiply_all<true>(tile.rows, padded, tile.scores, 1, kTileRows, values, padded, keys, tile.result,
                           padded);
    }
    float sums[kTileRows];
    for (int64_t n = 0; n < kTileRows / 16; ++n) store(sums + n * 16, sum[n]);
    for (int64_t r = 0; r < tile.rows; ++r) {
        for (int64_t d = 0; d < padded; d += 16) {
            store(tile.result + r * padded + d, load(tile.result + r * padded + d) / sums[r]);
        }
    }
}

inline float dot(const float* a, const float* b, int64_t size) {
    Floats sum = {};
    int64_t d = 0;
    for (; d + 16 <= size; d += 16) sum += load(a + d) * load(b + d);
    float result = sum_lanes(sum);
    for (; d < size; ++d) result += a[d] * b[d];
    return result;
}

// result[head][0 ... 16 * columns - 1] = sum over slots of weights[head * stride + slot] * values[slot]; of
// the last column `count` are there.
template <class Element, int heads, int columns>
void mix(const float* weights, int64_t stride, int64_t slots, const typename Element::Stored* values,
         int64_t size, int64_t count, float* result) {
    Floats sum[heads][columns] = {};
    for (int64_t j = 0; j < slots; ++j) {
#pragma GCC unroll 16
        for (int n = 0; n < columns; ++n) {
            const auto* at = values + j * size + n * 16;
            if (n * 16 % kLine<Element> == 0) prefetch(at + kAheadElements<Element>);
            const Floats value = columns > 1 ? Element::read(at) : read<Element>(at, count);
#pragma GCC unroll 16
            for (int h = 0; h < heads; ++h) sum[h][n] += weights[h * stride + j] * value;
        }
    }
#pragma GCC unroll 16
    for (int h = 0; h < heads; ++h) {
#pragma GCC unroll 16
        for (int n = 0; n < columns; ++n) {
            const size_t wanted = columns > 1 || count >= 16 ? 16 : static_cast<size_t>(count);
            std::memcpy(result + h * size + n * 16, &sum[h][n], wanted * sizeof(float));
        }
    }
}

template <class Element, int heads>
void mix_heads(const float* weights, int64_t stride, int64_t slots, const typename Element::Stored* values,
               int64_t size, float* result) {
    int64_t d = 0;
    if constexpr (kMixColumns > 1) {
        for (; d + 16 * kMixColumns <= size; d += 16 * kMixColumns) {
            mix<Element, heads, kMixColumns>(weights, stride, slots, values + d, size, 16, result + d);
        }
    }
    for (; d < size; d += 16) {
        mix<Element, heads, 1>(weights, stride, slots, values + d, size, size - d, result + d);
    }
}

template <class Element, int heads>
void mix_count(int64_t count, const float* weights, int64_t stride, int64_t slots,
               const typename Element::Stored* values, int64_t size, float* result) {
    if (count == heads) return mix_heads<Element, heads>(weights, stride, slots, values, size, result);
    if constexpr (heads > 1)
        mix_count<Element, heads - 1>(count, weights, stride, slots, values, size, result);
}

// One query against `slots` keys: sixteen at a time, whose sums of lanes are taken together.
void score(const float* query, const float* keys, int64_t slots, int64_t size, float* scores) {
    int64_t j = 0;
    for (; j + 16 <= slots && size % 16 == 0; j += 16) {
        Floats sums[16] = {};
        for (int64_t d = 0; d < size; d += 16) {
            const Floats part = load(query + d);
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i) sums[i] += part * load(keys + (j + i) * size + d);
        }
        store(scores + j, sum_each(sums));
    }
    for (; j < slots; ++j) scores[j] = dot(query, keys + j * size, size);
}

template <class Element>
void attend_one(const AttendOne& one) {
    const int64_t slots = one.end - one.begin, size = one.size, stride = padded_size(slots);
    const auto* keys = static_cast<const typename Element::Stored*>(one.keys);
    const auto* values = static_cast<const typename Element::Stored*>(one.values) + one.begin * size;
    const int64_t ahead = kAheadElements<Element> / size;
    for (int64_t j = 0; j < slots; j += kBlockSlots) {
        const int64_t count = slots - j < kBlockSlots ? slots - j : kBlockSlots, then = j + ahead;
        const auto* soon = then < slots ? keys + (one.begin + then) * size : values + (then - slots) * size;
        for (int64_t d = 0; d < count * size; d += kLine<Element>) prefetch(soon + d);
        const float* block = keys_of<Element>(keys, one.form, one.begin + j, count, size, one.block);
        for (int64_t h = 0; h < one.heads; ++h) {
            score(one.queries + h * size, block, count, size, one.scores + h * stride + j);
        }
    }
    for (int64_t h = 0; h < one.heads; ++h) {
        float* scores = one.scores + h * stride;
        if (one.softcap != 0) {
            for (int64_t j = 0; j < slots; j += 16) store(scores + j, cap(load(scores + j), one.softcap));
        }
        for (int64_t j = slots; j < stride; ++j) scores[j] = kUnseen;
        Floats most = all(kUnseen), sum = {};
        for (int64_t j = 0; j < stride; j += 16) most = larger(load(scores + j), most);
        const float maximum = largest_lane(most);
        for (int64_t j = 0; j < stride; j += 16) {
            const Floats weight = exponential(load(scores + j) - maximum);
            store(scores + j, weight);
            sum += weight;
        }
        one.maximum[h] = maximum;
        one.sum[h] = sum_lanes(sum);
    }
    for (int64_t h = 0; h < one.heads; h += kMixHeads) {
        const int64_t count = one.heads - h < kMixHeads ? one.heads - h : kMixHeads;
        mix_count<Element, kMixHeads>(count, one.scores + h * stride, stride, slots, values, size,
                                      one.result + h * size);
    }
}

template <class Element>
constexpr CacheKernels cache_kernels() {
    return {encode<Element>, attend_one<Element>, attend_tile<Element>};
}

}  // namespace
}  // namespace kvgraph
