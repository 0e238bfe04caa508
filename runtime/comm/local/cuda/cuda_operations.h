// Local collectives of ranks that share one GPU.
#pragma once

#include <memory>

#include "runtime/comm/local/local_operations.h"

namespace slidedp {

// Enqueues on the stream whose launch() it is called in. Sums have the CPU backend's bits, save which NaN a NaN is.
std::shared_ptr<LocalOperations> make_cuda_operations();

}  // namespace slidedp
