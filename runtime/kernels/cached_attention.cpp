#include "cached_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "cached_operands.h"

namespace kvgraph {

CachedAttention::CachedAttention(const Attributes& attributes)
    : heads_(attributes.integer("num_heads")),
      kv_heads_(attributes.integer("kv_num_heads")),
      size_(attributes.integer("head_dim")),
      window_(attributes.integer("window")),
      rotary_(attributes.integer("rotary_dim")),
      scale_(attributes.number("scale")),
      softcap_(attributes.number("softcap")),
      epsilon_(attributes.number("norm_epsilon")),
      interleaved_(attributes.integer("interleaved") != 0) {
    if (kv_heads_ < 1 || heads_ % kv_heads_ != 0)
        throw std::invalid_argument("num_heads is no multiple of kv_num_heads");
    if (rotary_ % 2 != 0 || rotary_ > size_)
        throw std::invalid_argument("rotary_dim is odd or above head_dim");
}

void CachedAttention::run(const Call& call) const {
    AttentionOperands operands = read_operands(call, heads_, kv_heads_, size_, rotary_, softcap_ != 0);
    thread_local Scratch scratch;
    const int64_t rows = operands.batch * operands.tokens;
    operands.queries =
        static_cast<float*>(scratch.reserve(static_cast<size_t>(rows * heads_ * size_) * sizeof(float)));
    const int64_t step = std::max<int64_t>(1, 16384 / ((heads_ + 2 * kv_heads_) * size_));
    call.parallel(static_cast<size_t>((rows + step - 1) / step), [&](size_t task) {
        const int64_t first = static_cast<int64_t>(task) * step;
        for (int64_t row = first; row < std::min(rows, first + step); ++row) write(operands, row);
    });
    if (operands.tokens == 1) return one_position(call, operands);
    many_positions(call, operands);
}

// One token of one row of the batch.
void CachedAttention::write(const AttentionOperands& operands, int64_t row) const {
    const float* from = operands.qkv + row * (heads_ + 2 * kv_heads_) * size_;
    const int64_t b = row / operands.tokens, slot = operands.past[b] + row % operands.tokens;
    for (int64_t h = 0; h < heads_; ++h) {
        float* to = operands.queries + (row * heads_ + h) * size_;
        place(from + h * size_, operands.q_norm, operands, row, true, scale_, to);
        if (operands.key_scale == nullptr || operands.forms_keys) continue;
        const float* scale = operands.key_scale + h / (heads_ / kv_heads_) * size_;
        for (int64_t d = 0; d < size_; ++d) to[d] *= scale[d];
    }
    from += heads_ * size_;
    thread_local Scratch scratch;
    auto* key = static_cast<float*>(scratch.reserve(static_cast<size_t>(size_) * sizeof(float)));
    auto of = [&](const float* channels, int64_t k) {
        return channels == nullptr ? channels : channels + k * size_;
    };
    for (int64_t k = 0; k < kv_heads_; ++k) {
        const int64_t at = ((b * kv_heads_ + k) * operands.capacity + slot) * size_ * operands.bytes;
        place(from + k * size_, operands.k_norm, operands, row, operands.key_cos == nullptr, 1.0f, key);
        operands.cache().encode(key, of(operands.key_scale, k), of(operands.key_offset, k), size_,
                                operands.keys + at);
        operands.cache().encode(from + (kv_heads_ + k) * size_, of(operands.value_scale, k),
                                of(operands.value_offset, k), size_, operands.values + at);
    }
}

// One head, normed, perhaps rotated, and times a scale.
void CachedAttention::place(const float* from, const float* norm, const AttentionOperands& operands,
                            int64_t row, bool turn, float scale, float* to) const {
    for (int64_t d = 0; d < size_; ++d) to[d] = from[d];
    if (norm != nullptr) {
        float squares = 0;
        for (int64_t d = 0; d < size_; ++d) squares += to[d] * to[d];
        const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size_) + epsilon_);
        for (int64_t d = 0; d < size_; ++d) to[d] = to[d] * factor * norm[d];
    }
    const int64_t half = rotary_ / 2, apart = interleaved_ ? 1 : half, along = interleaved_ ? 2 : 1;
    for (int64_t i = 0; i < half && turn; ++i) {
        const float cos = operands.cos[row * half + i], sin = operands.sin[row * half + i];
        float* pair = to + i * along;
        const float first = pair[0], second = pair[apart];
        pair[0] = first * cos - second * sin;
        pair[apart] = second * cos + first * sin;
    }
    for (int64_t d = 0; d < size_; ++d) to[d] *= scale;
}

KeyForm CachedAttention::key_form(const AttentionOperands& operands, int64_t kv_head) const {
    if (!operands.forms_keys) return {};
    return {operands.key_scale + kv_head * size_,
            operands.key_offset + kv_head * size_,
            operands.key_cos,
            operands.key_sin,
            rotary_ / 2,
            interleaved_};
}

// What a head attended to, with the scales and offsets of its values.
void CachedAttention::deliver(const AttentionOperands& operands, int64_t head, const float* from,
                              float* to) const {
    if (operands.value_scale == nullptr) {
        std::memcpy(to, from, static_cast<size_t>(size_) * sizeof(float));
        return;
    }
    const int64_t at = head / (heads_ / kv_heads_) * size_;
    for (int64_t d = 0; d < size_; ++d)
        to[d] = from[d] * operands.value_scale[at + d] + operands.value_offset[at + d];
}

// A token for each row: a long cache is read in parts, by several threads, and the parts are joined.
void CachedAttention::one_position(const Call& call, const AttentionOperands& operands) const {
    const int64_t group = heads_ / kv_heads_, batch = operands.batch;
    int64_t longest = 0;
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t length = operands.past[b] + 1;
        longest = std::max(longest, window_ > 0 ? std::min(window_, length) : length);
    }
    const int64_t parts =
        std::clamp<int64_t>((longest + 255) / 256, 1, std::max<int64_t>(1, 64 / (batch * kv_heads_)));
    const int64_t part_slots = (longest + parts - 1) / parts;
    const int64_t stride = size_ + 2;  // result, maximum, sum
    thread_local Scratch partial;
    auto* results = static_cast<float*>(
        partial.reserve(static_cast<size_t>(batch * heads_ * parts * stride) * sizeof(float)));
    call.parallel(static_cast<size_t>(batch * kv_heads_ * parts), [&](size_t task) {
        const int64_t part = static_cast<int64_t>(task) % parts, pair = static_cast<int64_t>(task) / parts;
        const int64_t b = pair / kv_heads_, k = pair % kv_heads_, end = operands.past[b] + 1;
        const int64_t start = window_ > 0 ? std::max<int64_t>(0, end - window_) : 0;
        const int64_t begin = start + part * part_slots, stop = std::min(end, begin + part_slots);
        thread_local Scratch scratch;
        const int64_t slots = std::max<int64_t>(0, stop - begin);
        auto* memory = static_cast<float*>(scratch.reserve(
            static_cast<size_t>(kMaxGroup * (padded_size(slots) + size_ + 2) + kBlockSlots * size_) *
            sizeof(float)));
        const int64_t cache = pair * operands.capacity * size_ * operands.bytes;
        const KeyForm form = key_form(operands, k);
        for (int64_t h = 0; h < group; h += kMaxGroup) {
            const int64_t heads = std::min(group - h, kMaxGroup), head = b * heads_ + k * group + h;
            float* result = memory + kMaxGroup * padded_size(slots);
            float* maximum = result + kMaxGroup * size_;
            if (slots > 0) {
                operands.cache().attend_one({operands.queries + head * size_, operands.keys + cache,
                                             operands.values + cache, operands.forms_keys ? &form : nullptr,
                                             begin, stop, heads, size_, softcap_, maximum + 2 * kMaxGroup,
                                             memory, result, maximum, maximum + kMaxGroup});
            }
            for (int64_t i = 0; i < heads; ++i) {
                float* to = results + ((head + i) * parts + part) * stride;
                to[size_ + 1] = slots > 0 ? maximum[kMaxGroup + i] : 0;
                to[size_] = slots > 0 ? maximum[i] : 0;
                if (slots > 0)
                    std::memcpy(to, result + i * size_, static_cast<size_t>(size_) * sizeof(float));
            }
        }
    });
    for (int64_t head = 0; head < batch * heads_; ++head) {
        const float* from = results + head * parts * stride;
        float* to = operands.output + head * size_;
        float maximum = from[size_], sum = 0;
        for (int64_t part = 1; part < parts; ++part) {
            const float* piece = from + part * stride;
            if (piece[size_ + 1] > 0) maximum = std::max(maximum, piece[size_]);
        }
        std::fill(to, to + size_, 0.0f);
        for (int64_t part = 0; part < parts; ++part) {
            const float* piece = from + part * stride;
            if (!(piece[size_ + 1] > 0)) continue;
            const float factor = std::exp(piece[size_] - maximum);
            sum += piece[size_ + 1] * factor;
            for (int64_t d = 0; d < size_; ++d) to[d] += piece[d] * factor;
        }
        for (int64_t d = 0; d < size_; ++d) to[d] /= sum;
        deliver(operands, head % heads_, to, to);
    }
}

void CachedAttention::many_positions(const Call& call, const AttentionOperands& operands) const {
    const int64_t group = heads_ / kv_heads_, positions = std::max<int64_t>(1, kTileRows / group);
    const int64_t tiles = (operands.tokens + positions - 1) / positions;
    call.parallel(static_cast<size_t>(operands.batch * kv_heads_ * tiles), [&](size_t task) {
        // The longest, at the end of the prompt, first.
        const int64_t index = static_cast<int64_t>(task),
                      at = tiles - 1 - index / (operands.batch * kv_heads_);
        const int64_t pair = index % (operands.batch * kv_heads_);
        tile(operands, pair / kv_heads_, pair % kv_heads_, at * positions);
    });
}

// The positions from `begin` on that fit a tile with all heads of a group; a group larger than a tile takes
// several.
void CachedAttention::tile(const AttentionOperands& operands, int64_t row, int64_t head,
                           int64_t begin) const {
    const int64_t group = heads_ / kv_heads_, padded = padded_size(size_);
    const int64_t positions = std::min(std::max<int64_t>(1, kTileRows / group), operands.tokens - begin);
    thread_local Scratch scratch;
    auto* memory = static_cast<float*>(
        scratch.reserve(static_cast<size_t>(size_ * (kTileRows + kTileKeys) + kTileKeys * kTileRows +
                                            kTileKeys * padded + kTileRows * padded) *
                        sizeof(float)));
    float* queries = memory;
    float* scores = queries + size_ * kTileRows;
    float* values = scores + kTileKeys * kTileRows;
    float* result = values + kTileKeys * padded;
    float* block = result + kTileRows * padded;
    const int64_t cache = (row * kv_heads_ + head) * operands.capacity * size_ * operands.bytes;
    const KeyForm form = key_form(operands, head);
    std::memset(values, 0, static_cast<size_t>(kTileKeys * padded) * sizeof(float));
    for (int64_t top = 0; top < group * positions; top += kTileRows) {
        const int64_t rows = std::min(group * positions - top, kTileRows);
        int64_t first[kTileRows], last[kTileRows];
        std::memset(queries, 0, static_cast<size_t>(size_ * kTileRows) * sizeof(float));
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t position = begin + (top + r) / group, h = head * group + (top + r) % group;
            last[r] = operands.past[row] + position;
            first[r] = window_ > 0 ? std::max<int64_t>(0, last[r] - window_ + 1) : 0;
            const float* from = operands.queries + ((row * operands.tokens + position) * heads_ + h) * size_;
            for (int64_t d = 0; d < size_; ++d) queries[d * kTileRows + r] = from[d];
        }
        operands.cache().attend_tile({queries, first, last, operands.keys + cache, operands.values + cache,
                                      operands.forms_keys ? &form : nullptr, rows, size_, softcap_, block,
                                      scores, values, result});
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t position = begin + (top + r) / group, h = head * group + (top + r) % group;
            deliver(operands, h, result + r * padded,
                    operands.output + ((row * operands.tokens + position) * heads_ + h) * size_);
        }
    }
}

}  // namespace kvgraph
