#include "operator.h"

#include <cstdlib>
#include <new>

namespace kvgraph {

void Attributes::check(OrtStatus* status, const char* name) const {
    if (status == nullptr) return;
    ReleaseStatus::of(api_)(status);
    throw std::invalid_argument(std::string("attribute ") + name + " is missing or of another type");
}

int64_t Attributes::integer(const char* name) const {
    int64_t value = 0;
    check(KernelInfoGetInt64::of(api_)(info_, name, &value), name);
    return value;
}

float Attributes::number(const char* name) const {
    float value = 0;
    check(KernelInfoGetFloat::of(api_)(info_, name, &value), name);
    return value;
}

std::string Attributes::text(const char* name) const {
    size_t size = 0;
    check(KernelInfoGetString::of(api_)(info_, name, nullptr, &size), name);
    std::string value(size, '\0');
    check(KernelInfoGetString::of(api_)(info_, name, value.data(), &size), name);
    value.resize(size == 0 ? 0 : size - 1);  // the size counts a closing zero
    return value;
}

int64_t Tensor::rows() const {
    int64_t count = 1;
    for (size_t axis = 0; axis + 1 < shape.size(); ++axis) count *= shape[axis];
    return count;
}

void Call::check(OrtStatus* status) const {
    if (status == nullptr) return;
    ReleaseStatus::of(api_)(status);
    throw std::runtime_error("ONNX Runtime refused a call of its C interface");
}

Tensor Call::input(size_t index) const {
    Tensor tensor;
    const OrtValue* value = nullptr;
    check(KernelContextGetInput::of(api_)(context_, index, &value));
    if (value == nullptr) return tensor;
    void* data = nullptr;
    check(GetTensorMutableData::of(api_)(const_cast<OrtValue*>(value), &data));
    tensor.data = data;
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(GetTensorTypeAndShape::of(api_)(value, &info));
    check(GetTensorElementType::of(api_)(info, &tensor.type));
    size_t rank = 0;
    check(GetDimensionsCount::of(api_)(info, &rank));
    tensor.shape.resize(rank);
    check(GetDimensions::of(api_)(info, tensor.shape.data(), rank));
    ReleaseTensorTypeAndShapeInfo::of(api_)(info);
    return tensor;
}

void* Call::output(size_t index, const std::vector<int64_t>& shape) const {
    OrtValue* value = nullptr;
    check(KernelContextGetOutput::of(api_)(context_, index, shape.data(), shape.size(), &value));
    void* data = nullptr;
    check(GetTensorMutableData::of(api_)(value, &data));
    return data;
}

Scratch::~Scratch() { std::free(memory_); }

void* Scratch::reserve(size_t bytes) {
    if (bytes > bytes_) {
        std::free(memory_);
        bytes_ = (bytes + 4095) / 4096 * 4096;
        memory_ = std::aligned_alloc(64, bytes_);
        if (memory_ == nullptr) {
            bytes_ = 0;
            throw std::bad_alloc();
        }
    }
    return memory_;
}

}  // namespace kvgraph
