// Loops over weights for AVX2: processors since Haswell and Zen.
#if defined(__x86_64__)
#include <cstdint>
#include <cstring>

#include "weight_kernels.h"

#pragma GCC target("avx2,fma,f16c")
#include "weight_loops.h"

namespace kvgraph {

const WeightKernels kAvx2WeightKernels = kLoops;

}  // namespace kvgraph
#endif
