#include "counts.h"

#include <atomic>
#include <cstdint>

namespace {

// As the enum has them.
const char* const NAMES =
    "kernel launches,Triton launches,library calls,collectives,copies to the device,copies to the host,"
    "copies on the device,fills,event records,event queries,stream waits,host waits,device allocations,pinned allocations";
std::atomic<uint64_t> found[counts::CALLS];

}  // namespace

extern "C" {
void without_gpu_count(int call) { found[call].fetch_add(1, std::memory_order_relaxed); }

// For Python: the names, joined by commas; and since when the process began.
const char* without_gpu_count_names() { return NAMES; }
void without_gpu_counts(uint64_t* into) {
  for (int call = 0; call < counts::CALLS; call++) into[call] = found[call].load(std::memory_order_relaxed);
}
}
