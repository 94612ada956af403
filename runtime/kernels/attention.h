// One head of the cache and the query heads that share it: what a thread computes at once.
#pragma once

#include <cstdint>

namespace kvgraph {

constexpr int64_t kTileRows = 64;  // rows of a query tile: positions times heads
constexpr int64_t kTileKeys = 64;  // cache slots that a tile takes at once
constexpr int64_t kMaxGroup = 8;   // query heads that `attend_one` takes at once

// One position: its heads against the slots begin ... end - 1. The result is not divided by its sum yet, so
// that parts of a long cache can be joined.
struct AttendOne {
    const float* queries;  // [heads, size], times the scale
    const float* keys;     // [slots, size]
    const float* values;   // [slots, size]
    int64_t begin, end;
    int64_t heads, size;
    float softcap;
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
    const float* keys;
    const float* values;
    int64_t rows, size;
    float softcap;
    float* scores;  // [kTileKeys, kTileRows], scratch
    float* padded;  // [kTileKeys, padded size], scratch
    float* result;  // [rows, padded size]
};

inline int64_t padded_size(int64_t size) { return (size + 15) / 16 * 16; }

}  // namespace kvgraph
