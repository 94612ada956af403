// The entry that SessionOptions.register_custom_ops_library calls.
#include <exception>

#include "cached_attention.h"
#include "kernels.h"
#include "packed_experts.h"
#include "packed_linear.h"

namespace kvgraph {
namespace {

OrtStatus* failure(const OrtApi* api, const char* operator_name, const std::exception& error) {
    const std::string message = std::string(operator_name) + ": " + error.what();
    return CreateStatus::of(api)(kInvalidArgument, message.c_str());
}

template <class Operator>
struct Kernel {
    const OrtApi* api;
    Operator computation;
};

// ONNX Runtime's description of an operator, whose class says its name and the types of its inputs and
// outputs.
template <class Operator>
struct Description : OrtCustomOp {
    Description() : OrtCustomOp{} {
        version = kOrtApiVersion;
        GetName = [](const OrtCustomOp*) { return Operator::kName; };
        GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
        GetInputType = [](const OrtCustomOp*, size_t index) { return Operator::kInputs[index]; };
        GetInputTypeCount = [](const OrtCustomOp*) { return std::size(Operator::kInputs); };
        GetOutputType = [](const OrtCustomOp*, size_t index) { return Operator::kOutputs[index]; };
        GetOutputTypeCount = [](const OrtCustomOp*) { return std::size(Operator::kOutputs); };
        GetInputCharacteristic = [](const OrtCustomOp*, size_t index) {
            return index < Operator::kRequiredInputs ? kRequired : kOptional;
        };
        GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return kRequired; };
        GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
        GetStartVersion = [](const OrtCustomOp*) { return 1; };
        GetEndVersion = [](const OrtCustomOp*) { return 1; };
        CreateKernelV2 = create;
        KernelComputeV2 = compute;
        KernelDestroy = [](void* kernel) { delete static_cast<Kernel<Operator>*>(kernel); };
    }

    static OrtStatus* create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info,
                             void** kernel) {
        try {
            *kernel = new Kernel<Operator>{api, Operator(Attributes(api, info))};
            return nullptr;
        } catch (const std::exception& error) {
            return failure(api, Operator::kName, error);
        }
    }

    static OrtStatus* compute(void* kernel, OrtKernelContext* context) {
        const auto* self = static_cast<const Kernel<Operator>*>(kernel);
        try {
            self->computation.run(Call(self->api, context));
            return nullptr;
        } catch (const std::exception& error) {
            return failure(self->api, Operator::kName, error);
        }
    }
};

}  // namespace
}  // namespace kvgraph

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) {
    using namespace kvgraph;
    static const Description<PackedLinear> linear;
    static const Description<PackedGather> gather;
    static const Description<CachedAttentionOf<kFloat>> attention;
    static const Description<CachedAttentionOf<kFloat16>> attention_float16;
    static const Description<CachedAttentionOf<kInt8>> attention_int8;
    static const Description<CachedAttentionOf<kFloat8E4M3>> attention_float8;
    static const Description<PackedExperts> experts;
    const OrtApi* api = base->GetApi(kOrtApiVersion);
    // Sessions use the domain until the process ends.
    static OrtCustomOpDomain* domain = nullptr;
    if (domain == nullptr) {
        if (OrtStatus* status = CreateCustomOpDomain::of(api)("kvgraph", &domain)) return status;
        for (const OrtCustomOp* op :
             {static_cast<const OrtCustomOp*>(&linear), static_cast<const OrtCustomOp*>(&gather),
              static_cast<const OrtCustomOp*>(&attention),
              static_cast<const OrtCustomOp*>(&attention_float16),
              static_cast<const OrtCustomOp*>(&attention_int8),
              static_cast<const OrtCustomOp*>(&attention_float8),
              static_cast<const OrtCustomOp*>(&experts)}) {
            if (OrtStatus* status = CustomOpDomainAdd::of(api)(domain, op)) return status;
        }
    }
    return AddCustomOpDomain::of(api)(options, domain);
}

// The instruction set in use, for reports; another one, for tests.
extern "C" __attribute__((visibility("default"))) const char* kvgraph_instruction_set() {
    return kvgraph::kernels().name;
}
extern "C" __attribute__((visibility("default"))) int kvgraph_choose_instruction_set(const char* name) {
    return kvgraph::choose_kernels(name) ? 1 : 0;
}
