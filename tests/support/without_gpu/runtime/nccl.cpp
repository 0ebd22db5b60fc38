// NCCL's functions, as far as PyTorch's process group calls them.
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>

#include "communicator.h"
#include "counts.h"
#include "runtime.h"

using namespace nccl;

namespace {

struct Id {
  char text[128];
};
const size_t WIDTHS[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
enum { SUM, PRODUCT, LARGEST, LEAST, MEAN };

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  BFloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = value != value ? 0x7fc0 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
  }
};

template <class T, class Wide = T>
void add_up(void* into, const std::vector<const char*>& from, size_t count, int reduction) {
  for (size_t i = 0; i < count; i++) {
    T value = ((const T*)from[0])[i];
    for (size_t rank = 1; rank < from.size(); rank++) {  // each sum is rounded to the type, as on the way from rank to rank
      Wide a = value, b = ((const T*)from[rank])[i];
      value = reduction == PRODUCT ? Wide(a * b) : reduction == LARGEST ? (a > b ? a : b) : reduction == LEAST ? (a < b ? a : b) : Wide(a + b);
    }
    if (reduction == MEAN) value = Wide(Wide(value) / Wide(from.size()));
    ((T*)into)[i] = value;
  }
}

void reduce(void* into, const std::vector<const char*>& from, size_t count, int type, int reduction) {
  switch (type) {
    case 0: return add_up<int8_t>(into, from, count, reduction);
    case 1: return add_up<uint8_t>(into, from, count, reduction);
    case 2: return add_up<int32_t>(into, from, count, reduction);
    case 4: return add_up<int64_t>(into, from, count, reduction);
    case 6: return add_up<_Float16, float>(into, from, count, reduction);
    case 7: return add_up<float>(into, from, count, reduction);
    case 8: return add_up<double>(into, from, count, reduction);
    case 9: return add_up<BFloat16, float>(into, from, count, reduction);
    default: queues::fail("NCCL adds up no elements of type " + std::to_string(type));
  }
}

// Every rank's bytes of the collective that runs now, from `offset` on.
std::vector<const char*> slots(Communicator* communicator, uint64_t number, size_t offset = 0) {
  std::vector<const char*> found;
  for (int rank = 0; rank < communicator->size; rank++) found.push_back(communicator->shared.slot(rank, number) + offset);
  return found;
}

uint64_t next(Communicator* communicator) {
  std::lock_guard<std::mutex> lock(communicator->mutex);
  return communicator->enqueued + 1;
}

// A rank of a null device meets nobody: its board is its own.
Communicator* alone(const std::string& name, int size, int rank) {
  auto* made = new Communicator(name + "-" + std::to_string(rank), 0, 1, runtime::current_device());
  made->shared.unlink();
  made->size = size, made->rank = rank;
  return made;
}

// A collective of a null device: all ranks hold what this one holds.
Result alike(void* into, const void* send, size_t bytes, int copies = 1) {
  without_gpu_count(counts::COLLECTIVES);
  for (int i = 0; i < copies; i++) runtime::carry((char*)into + i * bytes, send, bytes, true);
  return OK;
}

Result open(Communicator** into, const std::string& name, int size, int rank) {
  try {
    if (runtime::is_null()) return *into = alone(name, size, rank), OK;
    auto* made = new Communicator(name, rank, size, runtime::current_device());
    if (!made->shared.meet()) {
      set_last_error("not all ranks came to make " + name + made->report());
      return REMOTE;
    }
    if (rank == 0) made->shared.unlink();
    for (int one = 0; one < size; one++)
      for (int other = 0; other < one; other++)
        if (made->shared->members[one].device == made->shared->members[other].device) {
          set_last_error("Duplicate GPU detected : rank " + std::to_string(other) + " and rank " + std::to_string(one) +
                         " both on CUDA device " + std::to_string(made->shared->members[one].device));
          return BAD_USAGE;
        }
    queues::add_poll([made] { made->poll(); });
    queues::add_report([made] { return made->is_aborted ? std::string() : made->report(); });
    *into = made;
    return OK;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return SYSTEM;
  }
}

}  // namespace

extern "C" {
Result ncclGetVersion(int* into) { return *into = 22907, OK; }
Result ncclGetUniqueId(Id* into) {
  static std::atomic<int> count{0};
  memset(into, 0, sizeof *into);
  snprintf(into->text, 64, "/without-gpu-%d-%d-%ld", getpid(), count++, (long)time(nullptr));
  return OK;
}
Result ncclCommInitRankConfig(Communicator** into, int size, Id id, int rank, void*) { return open(into, id.text, size, rank); }
Result ncclCommInitRank(Communicator** into, int size, Id id, int rank) { return open(into, id.text, size, rank); }
Result ncclCommInitRankScalable(Communicator** into, int size, int rank, int, Id* ids, void*) {
  return open(into, ids[0].text, size, rank);
}
Result ncclCommSplit(Communicator* of, int color, int key, Communicator** into, void*) {
  if (runtime::is_null()) return set_last_error("a null device splits no communicator"), BAD_USAGE;
  static std::atomic<int> count{0};
  auto& own = of->shared->members[of->rank];
  own.color = color, own.key = key;
  if (!of->shared.meet()) return REMOTE;
  int size = 0, rank = 0;
  for (int other = 0; other < of->size; other++) {
    auto& member = of->shared->members[other];
    if (member.color != color) continue;
    size++;
    rank += member.key < key || (member.key == key && other < of->rank);
  }
  if (!of->shared.meet()) return REMOTE;  // all have read
  *into = nullptr;
  std::string name = of->name + "-" + std::to_string(count++) + "-" + std::to_string(color);
  return color < 0 ? OK : open(into, name, size, rank);
}
Result ncclCommDestroy(Communicator* of) { return of->is_aborted = true, OK; }
Result ncclCommFinalize(Communicator*) { return OK; }
Result ncclCommAbort(Communicator* of) { return of->is_aborted = true, OK; }
Result ncclCommGetAsyncError(Communicator* of, Result* into) { return *into = of->has_failed ? REMOTE : OK, OK; }
Result ncclCommCount(Communicator* of, int* into) { return *into = of->size, OK; }
Result ncclCommUserRank(Communicator* of, int* into) { return *into = of->rank, OK; }
const char* ncclGetErrorString(Result code) {
  return code == OK ? "no error" : code == BAD_USAGE ? "invalid usage" : code == REMOTE ? "remote process exited or there was "
         "a network error" : "an error of the stand-in of NCCL";
}
const char* ncclGetLastError(Communicator*) {
  static thread_local std::string text;
  text = last_error();
  return text.c_str();
}
Result ncclGroupStart() { return begin_group(), OK; }
Result ncclGroupEnd() { return end_group(); }

Result ncclAllGather(const void* send, void* into, size_t count, int type, Communicator* of, void* stream) {
  size_t bytes = count * WIDTHS[type];
  if (runtime::is_null()) return alike(into, send, bytes, of->size);
  uint64_t number = next(of);
  return enqueue_collective(of, {ALL_GATHER, type, 0, 0, count}, send, bytes, stream, [=] {
    for (int rank = 0; rank < of->size; rank++) memcpy((char*)into + rank * bytes, of->shared.slot(rank, number), bytes);
  });
}
Result ncclReduceScatter(const void* send, void* into, size_t count, int type, int reduction, Communicator* of, void* stream) {
  size_t bytes = count * WIDTHS[type];
  if (runtime::is_null()) return alike(into, (const char*)send + of->rank * bytes, bytes);
  uint64_t number = next(of);
  return enqueue_collective(of, {REDUCE_SCATTER, type, reduction, 0, count}, send, bytes * of->size, stream,
                            [=] { reduce(into, slots(of, number, of->rank * bytes), count, type, reduction); });
}
Result ncclAllReduce(const void* send, void* into, size_t count, int type, int reduction, Communicator* of, void* stream) {
  if (runtime::is_null()) return alike(into, send, count * WIDTHS[type]);
  uint64_t number = next(of);
  return enqueue_collective(of, {ALL_REDUCE, type, reduction, 0, count}, send, count * WIDTHS[type], stream,
                            [=] { reduce(into, slots(of, number), count, type, reduction); });
}
Result ncclReduce(const void* send, void* into, size_t count, int type, int reduction, int root, Communicator* of, void* stream) {
  if (runtime::is_null()) return alike(into, send, count * WIDTHS[type]);
  uint64_t number = next(of);
  return enqueue_collective(of, {REDUCE, type, reduction, root, count}, send, count * WIDTHS[type], stream, [=] {
    if (of->rank == root) reduce(into, slots(of, number), count, type, reduction);
  });
}
Result ncclBroadcast(const void* send, void* into, size_t count, int type, int root, Communicator* of, void* stream) {
  if (runtime::is_null()) return alike(into, send, count * WIDTHS[type]);
  uint64_t number = next(of);
  return enqueue_collective(of, {BROADCAST, type, 0, root, count}, of->rank == root ? send : nullptr, count * WIDTHS[type],
                            stream, [=] { memcpy(into, of->shared.slot(root, number), count * WIDTHS[type]); });
}
Result ncclBcast(void* both, size_t count, int type, int root, Communicator* of, void* stream) {
  return ncclBroadcast(both, both, count, type, root, of, stream);
}
Result ncclAlltoAll(const void* send, void* into, size_t count, int type, Communicator* of, void* stream) {
  size_t bytes = count * WIDTHS[type];
  if (runtime::is_null()) return alike(into, send, bytes * of->size);
  uint64_t number = next(of);
  return enqueue_collective(of, {ALL_TO_ALL, type, 0, 0, count}, send, bytes * of->size, stream, [=] {
    for (int rank = 0; rank < of->size; rank++)
      memcpy((char*)into + rank * bytes, of->shared.slot(rank, number) + of->rank * bytes, bytes);
  });
}
Result ncclSend(const void* from, size_t count, int type, int peer, Communicator* of, void* stream) {
  return enqueue_send(of, from, count * WIDTHS[type], peer, stream);
}
Result ncclRecv(void* into, size_t count, int type, int peer, Communicator* of, void* stream) {
  return enqueue_receive(of, into, count * WIDTHS[type], peer, stream);
}
}
