// Loops over weights for AVX-512: servers since Skylake, and Zen 4.
#if defined(__x86_64__)
#include <cstdint>
#include <cstring>

#include "weight_kernels.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#include "weight_loops.h"

namespace kvgraph {

const WeightKernels kAvx512WeightKernels = kLoops;

}  // namespace kvgraph
#endif
