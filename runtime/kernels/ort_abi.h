// The few entries of ONNX Runtime's C interface that a custom operator needs.
//
// OrtApi is a table of functions that only ever grows at its end, so an entry is its index; the indices below
// are those of version 17, which every newer runtime keeps. OrtCustomOp is laid out as in that version too.
// Declaring them here means that a build needs a C++ compiler and no headers of ONNX Runtime, which its
// Python package does not carry.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
struct OrtApi;
struct OrtCustomOpDomain;
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtSessionOptions;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtValue;

struct OrtApiBase {
    const OrtApi* (*GetApi)(uint32_t version);
    const char* (*GetVersionString)();
};

struct OrtCustomOp {
    uint32_t version;
    void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
    const char* (*GetName)(const OrtCustomOp*);
    const char* (*GetExecutionProviderType)(const OrtCustomOp*);
    int (*GetInputType)(const OrtCustomOp*, size_t index);
    size_t (*GetInputTypeCount)(const OrtCustomOp*);
    int (*GetOutputType)(const OrtCustomOp*, size_t index);
    size_t (*GetOutputTypeCount)(const OrtCustomOp*);
    void (*KernelCompute)(void* kernel, OrtKernelContext*);
    void (*KernelDestroy)(void* kernel);
    int (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
    int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
    int (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
    int (*GetVariadicInputMinArity)(const OrtCustomOp*);
    int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
    int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
    int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
    OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
    OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
    OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, void*);
    int (*GetStartVersion)(const OrtCustomOp*);
    int (*GetEndVersion)(const OrtCustomOp*);
};
}

namespace kvgraph {

constexpr uint32_t kOrtApiVersion = 17;

// Element types, ONNXTensorElementDataType.
constexpr int kFloat = 1, kUint8 = 2, kInt8 = 3, kInt64 = 7, kFloat16 = 10, kFloat8E4M3 = 17;
// OrtCustomOpInputOutputCharacteristic.
constexpr int kRequired = 0, kOptional = 1;
// OrtErrorCode.
constexpr int kInvalidArgument = 2;

// Index of a function in OrtApi, and its type.
template <int index, class Function>
struct Entry {
    static Function of(const OrtApi* api) { return reinterpret_cast<Function const*>(api)[index]; }
};

using CreateStatus = Entry<0, OrtStatus* (*)(int code, const char* message)>;
using CreateCustomOpDomain = Entry<26, OrtStatus* (*)(const char* domain, OrtCustomOpDomain**)>;
using CustomOpDomainAdd = Entry<27, OrtStatus* (*)(OrtCustomOpDomain*, const OrtCustomOp*)>;
using AddCustomOpDomain = Entry<28, OrtStatus* (*)(OrtSessionOptions*, OrtCustomOpDomain*)>;
using GetTensorMutableData = Entry<51, OrtStatus* (*)(OrtValue*, void**)>;
using GetTensorElementType = Entry<60, OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, int*)>;
using GetDimensionsCount = Entry<61, OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, size_t*)>;
using GetDimensions = Entry<62, OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)>;
using GetTensorTypeAndShape = Entry<65, OrtStatus* (*)(const OrtValue*, OrtTensorTypeAndShapeInfo**)>;
using KernelInfoGetFloat = Entry<85, OrtStatus* (*)(const OrtKernelInfo*, const char*, float*)>;
using KernelInfoGetInt64 = Entry<86, OrtStatus* (*)(const OrtKernelInfo*, const char*, int64_t*)>;
using KernelInfoGetString = Entry<87, OrtStatus* (*)(const OrtKernelInfo*, const char*, char*, size_t*)>;
using KernelContextGetInput = Entry<90, OrtStatus* (*)(const OrtKernelContext*, size_t, const OrtValue**)>;
using KernelContextGetOutput =
    Entry<91, OrtStatus* (*)(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)>;
using ReleaseStatus = Entry<93, void (*)(OrtStatus*)>;
using ReleaseTensorTypeAndShapeInfo = Entry<99, void (*)(OrtTensorTypeAndShapeInfo*)>;
using ReleaseCustomOpDomain = Entry<101, void (*)(OrtCustomOpDomain*)>;
using KernelContextParallelFor = Entry<274, OrtStatus* (*)(const OrtKernelContext*, void (*)(void*, size_t),
                                                           size_t total, size_t batches, void*)>;

}  // namespace kvgraph
