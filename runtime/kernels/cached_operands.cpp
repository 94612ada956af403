#include "cached_operands.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace kvgraph {

namespace {

CacheType cache_type(int type) {
    if (type == kFloat) return CacheType::kFloat32;
    if (type == kFloat16) return CacheType::kFloat16;
    if (type == kInt8) return CacheType::kInt8;
    if (type == kFloat8E4M3) return CacheType::kFloat8;
    throw std::invalid_argument("the cache is neither float32, float16, int8 nor float8e4m3fn");
}

int64_t element_bytes(CacheType type) {
    return type == CacheType::kFloat32 ? 4 : type == CacheType::kFloat16 ? 2 : 1;
}

// The buffer that a cache is in after the step; the runtime binds one to both ends, else it is copied.
char* carried(const Call& call, size_t index, const Tensor& past, int64_t bytes) {
    auto* present = static_cast<char*>(call.output(index, past.shape));
    if (present != past.data) {
        for (const int64_t size : past.shape) bytes *= size;
        std::memcpy(present, past.data, static_cast<size_t>(bytes));
    }
    return present;
}

// The numbers of an optional input.
const float* numbers(const Tensor& tensor, const std::vector<int64_t>& shape, const char* what) {
    if (tensor.data != nullptr && tensor.shape != shape) throw std::invalid_argument(what);
    return tensor.as<float>();
}

}  // namespace

AttentionOperands read_operands(const Call& call, int64_t heads, int64_t kv_heads, int64_t size,
                                int64_t rotary, bool capped) {
    const Tensor qkv = call.input(0), past = call.input(1), keys = call.input(2), values = call.input(3);
    if (qkv.shape.size() != 3 || qkv.shape[2] != (heads + 2 * kv_heads) * size)
        throw std::invalid_argument("qkv has another shape than [B, S, (H + 2 K) * D]");
    AttentionOperands operands{};
    operands.batch = qkv.shape[0];
    operands.tokens = qkv.shape[1];
    const std::vector<int64_t> cache{operands.batch, kv_heads, keys.shape.size() == 4 ? keys.shape[2] : 0,
                                     size};
    if (keys.shape != cache || values.shape != cache || keys.type != values.type)
        throw std::invalid_argument("the cache has another shape than [B, K, T, D], or two types");
    operands.capacity = cache[2];
    operands.type = cache_type(keys.type);
    operands.bytes = element_bytes(operands.type);
    operands.past = past.as<int64_t>();
    for (int64_t b = 0; b < operands.batch; ++b) {
        const int64_t length = operands.past[b];
        if (length < 0 || length + operands.tokens > operands.capacity) {
            throw std::invalid_argument(
                "past_length " + std::to_string(length) + " and " + std::to_string(operands.tokens) +
                " tokens pass the end of a cache of " + std::to_string(operands.capacity));
        }
    }
    operands.qkv = qkv.as<float>();
    const std::vector<int64_t> angles{operands.batch, operands.tokens, rotary / 2},
        slots{1, operands.capacity, rotary / 2}, channels{kv_heads, size};
    const char *turn = "cos or sin has another shape than [B, S, R / 2]",
               *turns = "key_cos or key_sin has another shape than [1, T, R / 2]",
               *codes = "a scale or an offset has another shape than [K, D]";
    operands.cos = numbers(call.input(4), angles, turn);
    operands.sin = numbers(call.input(5), angles, turn);
    if (rotary != 0 && (operands.cos == nullptr || operands.sin == nullptr))
        throw std::invalid_argument("cos or sin is left out");
    operands.q_norm = call.input(6).as<float>();
    operands.k_norm = call.input(7).as<float>();
    operands.key_cos = numbers(call.input(8), slots, turns);
    operands.key_sin = numbers(call.input(9), slots, turns);
    operands.key_scale = numbers(call.input(10), channels, codes);
    operands.key_offset = numbers(call.input(11), channels, codes);
    operands.value_scale = numbers(call.input(12), channels, codes);
    operands.value_offset = numbers(call.input(13), channels, codes);
    const bool coded = operands.key_scale != nullptr && operands.key_offset != nullptr &&
                       operands.value_scale != nullptr && operands.value_offset != nullptr;
    if (coded != (operands.bytes == 1))
        throw std::invalid_argument("scales and offsets belong to a cache of 8 bits, all four of them");
    // An offset adds the same to all scores of a query, which matters to a soft cap alone.
    operands.forms_keys = coded && (operands.key_cos != nullptr || capped);
    operands.output = static_cast<float*>(call.output(0, {operands.batch, operands.tokens, heads * size}));
    operands.keys = carried(call, 1, keys, operands.bytes);
    operands.values = carried(call, 2, values, operands.bytes);
    return operands;
}

}  // namespace kvgraph
