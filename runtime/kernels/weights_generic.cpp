// Loops over weights for Any processor: what the compiler makes of it.
#include <cstdint>
#include <cstring>

#include "weight_kernels.h"
#include "weight_loops.h"

namespace kvgraph {

const WeightKernels kGenericWeightKernels = kLoops;

}  // namespace kvgraph
