#include <atomic>
#include <stdexcept>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace kvgraph {

namespace {

bool is_amd() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

// Those that this processor has, the best first.
const std::vector<const Kernels*>& available() {
    static const std::vector<const Kernels*> tables = [] {
        std::vector<const Kernels*> found;
#if defined(__x86_64__)
        static const Kernels amx = amx_kernels();
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            if (amx_available()) found.push_back(&amx);
            found.push_back(&kAvx512Kernels);
        }
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&kAvx2Kernels);
#endif
        found.push_back(&kGenericKernels);
        return found;
    }();
    return tables;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const bool kFetchesAhead = !is_amd();

const Kernels& kernels() {
    const Kernels* table = chosen.load(std::memory_order_relaxed);
    if (table == nullptr) chosen.store(table = available().front(), std::memory_order_relaxed);
    return *table;
}

bool choose_kernels(const std::string& name) {
    for (const Kernels* table : available()) {
        if (name == table->name) {
            chosen.store(table, std::memory_order_relaxed);
            return true;
        }
    }
    return false;
}

int64_t Packing::block_bytes() const {
    const int64_t scales = half_scales ? 32 : 64;
    switch (format) {
        case Format::kInt8:
            return 512;
        case Format::kInt8Block:
            return scales + 512;
        case Format::kInt4:
            return scales + 256;
        case Format::kUint4:
            return scales + 16 + 256;
        case Format::kFloat32:
            return kBlock * kPanel * 4;
        default:
            return kBlock * kPanel * 2;
    }
}

int64_t Packing::panel_bytes(int64_t in_features) const {
    switch (format) {
        case Format::kFloat32:
            return in_features * kPanel * 4;
        case Format::kFloat16:
        case Format::kBFloat16:
            return in_features * kPanel * 2;
        default:
            return (in_features + kBlock - 1) / kBlock * block_bytes() + (format == Format::kInt8 ? 64 : 0);
    }
}

Packing parse_packing(const std::string& format, const std::string& scale_format) {
    const bool half = scale_format == "float16";
    if (!half && scale_format != "float32" && !scale_format.empty()) {
        throw std::invalid_argument("scale_format is " + scale_format + ", expected float16 or float32");
    }
    if (format == "float32") return {Format::kFloat32, false};
    if (format == "float16") return {Format::kFloat16, false};
    if (format == "bfloat16") return {Format::kBFloat16, false};
    if (format == "int8") return {Format::kInt8, false};
    if (format == "int8-block") return {Format::kInt8Block, half};
    if (format == "int4") return {Format::kInt4, half};
    if (format == "uint4") return {Format::kUint4, half};
    throw std::invalid_argument("format " + format + " is unknown");
}

int split_parts(Format format) {
    return format == Format::kBFloat16 ? 1 : format == Format::kFloat16 ? 2 : 3;
}

Activation parse_activation(const std::string& name) {
    if (name.empty()) return kNone;
    if (name == "silu") return kSilu;
    if (name == "gelu") return kGelu;
    if (name == "gelu_tanh") return kGeluTanh;
    if (name == "relu") return kRelu;
    throw std::invalid_argument("activation " + name + " is unknown");
}

}  // namespace kvgraph
