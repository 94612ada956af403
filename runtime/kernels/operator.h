// An operator's view of a call: its inputs and outputs by index, its attributes by name, the runtime's
// threads.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort_abi.h"

namespace kvgraph {

// Reads a node's attributes when its kernel is made; throws std::invalid_argument where one is missing.
class Attributes {
  public:
    Attributes(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}
    int64_t integer(const char* name) const;
    float number(const char* name) const;
    std::string text(const char* name) const;

  private:
    void check(OrtStatus* status, const char* name) const;
    const OrtApi* api_;
    const OrtKernelInfo* info_;
};

// An input: its elements and its shape; `data` is null where an optional input is left out.
struct Tensor {
    const void* data = nullptr;
    std::vector<int64_t> shape;
    int type = 0;  // ONNXTensorElementDataType
    template <class T>
    const T* as() const {
        return static_cast<const T*>(data);
    }
    int64_t rows() const;  // product of all dimensions but the last
};

class Call {
  public:
    Call(const OrtApi* api, OrtKernelContext* context) : api_(api), context_(context) {}
    Tensor input(size_t index) const;
    void* output(size_t index, const std::vector<int64_t>& shape) const;

    // Runs body(0) ... body(count - 1) on the session's own threads.
    template <class Body>
    void parallel(size_t count, const Body& body) const {
        if (count == 1) return body(0);
        auto run = [](void* data, size_t index) { (*static_cast<const Body*>(data))(index); };
        check(KernelContextParallelFor::of(api_)(context_, run, count, 0, const_cast<Body*>(&body)));
    }

  private:
    void check(OrtStatus* status) const;
    const OrtApi* api_;
    OrtKernelContext* context_;
};

// Memory that a thread keeps between calls; what `reserve` returned before may move when it grows.
class Scratch {
  public:
    ~Scratch();
    void* reserve(size_t bytes);

  private:
    void* memory_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace kvgraph
