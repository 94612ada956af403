// One head of the cache and the query heads that share it: what a thread computes at once.
#pragma once

#include <cstdint>

namespace kvgraph {

constexpr int64_t kTileRows = 64;    // rows of a query tile: positions times heads
constexpr int64_t kTileKeys = 64;    // cache slots that a tile takes at once
constexpr int64_t kMaxGroup = 8;     // query heads that `attend_one` takes at once
constexpr int64_t kBlockSlots = 16;  // cache slots whose keys `attend_one` takes at once

// What a cache is made of. Codes are multiplied by nothing here: who calls puts scales into the queries and
// the result.
enum class CacheType { kFloat32, kFloat16, kInt8, kFloat8 };
constexpr int kCacheTypes = 4;

// How codes of keys that are kept without their rotary embedding become keys.
struct KeyForm {
    const float* scale;   // [size]
    const float* offset;  // [size]
    const float* cos;     // [slots, half], null where nothing turns
    const float* sin;     // [slots, half]
    int64_t half;
    bool interleaved;
};

// One position: its heads against the slots begin ... end - 1. The result is not divided by its sum yet, so
// that parts of a long cache can be joined.
struct AttendOne {
    const float* queries;  // [heads, size], times the scale
    const void* keys;      // [slots, size]
    const void* values;    // [slots, size]
    const KeyForm* form;   // null where keys are used as they are stored
    int64_t begin, end;
    int64_t heads, size;
    float softcap;
    float* block;    // [kBlockSlots, size], scratch
    float* scores;   // [heads, padded end - begin], scratch
    float* result;   // [heads, size]
    float* maximum;  // [heads]
    float* sum;      // [heads]
};

// Many positions: rows of queries, each against the slots from `first` to `last` (inclusive) of its own.
struct AttendTile {
    const float* queries;  // [size, kTileRows], times the scale: rows are lanes
    const int64_t* first;  // [kTileRows]
    const int64_t* last;   // [kTileRows]
    const void* keys;
    const void* values;
    const KeyForm* form;
    int64_t rows, size;
    float softcap;
    float* block;   // [kTileKeys, size], scratch
    float* scores;  // [kTileKeys, kTileRows], scratch
    float* padded;  // [kTileKeys, padded size], scratch, zero behind `size`
    float* result;  // [rows, padded size]
};

// What an instruction set has for each type of cache.
struct CacheKernels {
    // (from - offset) / scale as the cache stores it, rounded to the nearest, halves to even, and saturated;
    // float caches have no scale and no offset.
    void (*encode)(const float* from, const float* scale, const float* offset, int64_t size, void* to);
    void (*attend_one)(const AttendOne&);
    void (*attend_tile)(const AttendTile&);
};

inline int64_t padded_size(int64_t size) { return (size + 15) / 16 * 16; }

}  // namespace kvgraph
