// Collectives: each rank's values go to the board when its stream gets there; it goes on when all have come.
#include <cstring>

#include "communicator.h"
#include "counts.h"

namespace nccl {

namespace {

const char* const KINDS[] = {"all-gather", "reduce-scatter", "all-reduce", "broadcast", "reduce", "all-to-all"};

std::string in_words(const board::Call& call) {
  return std::string(KINDS[call.kind]) + " of " + std::to_string(call.count) + " elements of type " +
         std::to_string(call.type);
}

class Collective {
 public:
  Collective(Communicator* communicator, uint64_t number, board::Call call, const void* send, size_t bytes,
             std::function<void()> finish)
      : of_(communicator), number_(number), call_(call), send_(send), bytes_(bytes), finish_(std::move(finish)) {}

  bool advance() {
    auto& shared = of_->shared;
    auto& own = shared->members[of_->rank];
    if (of_->is_aborted) return true;
    if (own.ended + 1 < number_) return false;  // one of the same group, before it
    if (own.arrived < number_) {
      own.calls[number_ % 2] = call_;
      if (send_) memcpy(shared.slot(of_->rank, number_), send_, bytes_);
      own.arrived = number_;
    }
    if (missing() >= 0) return false;
    for (int peer = 0; peer < of_->size; peer++) {
      const auto& other = shared->members[peer].calls[number_ % 2];
      if (!(other == call_)) {
        queues::fail("ranks differ in collective " + std::to_string(number_) + " of " + of_->name + ": rank " +
                     std::to_string(of_->rank) + " is at an " + in_words(call_) + ", rank " + std::to_string(peer) + " at an " +
                     in_words(other));
        of_->has_failed = true;  // behind the report: torch's watchdog may end the process now
        return false;
      }
    }
    finish_();
    own.ended = number_;
    return true;
  }

  std::string waits_for() {
    int peer = missing();
    return peer < 0 ? "nobody" : "rank " + std::to_string(peer) + " in collective " + std::to_string(number_) + " of " + of_->name;
  }

 private:
  // A rank that has not come, and is told to; -1: none.
  int missing() {
    int found = -1;
    for (int peer = 0; peer < of_->size; peer++) {
      auto& member = of_->shared->members[peer];
      if (member.arrived >= number_) continue;
      found = peer;
      uint64_t before = member.demanded;
      while (before < number_ && !member.demanded.compare_exchange_weak(before, number_)) {}
    }
    return found;
  }

  Communicator* of_;
  uint64_t number_;
  board::Call call_;
  const void* send_;
  size_t bytes_;
  std::function<void()> finish_;
};

}  // namespace

Result enqueue_collective(Communicator* communicator, board::Call call, const void* send, size_t bytes, void* stream,
                          std::function<void()> finish) {
  if (communicator->is_aborted) return REMOTE;
  without_gpu_count(counts::COLLECTIVES);
  if (bytes > board::SLOT) {
    set_last_error("more bytes than a slot of the stand-in of NCCL holds");
    return BAD_ARGUMENT;
  }
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(communicator->mutex);
    number = ++communicator->enqueued;
    communicator->points.emplace_back();
  }
  auto collective = std::make_shared<Collective>(communicator, number, call, send, bytes, std::move(finish));
  Part part;
  part.advance = [collective] { return collective->advance(); };
  part.waits_for = [collective] { return collective->waits_for(); };
  part.placed = [communicator, number](queues::Point point) {
    std::lock_guard<std::mutex> lock(communicator->mutex);
    communicator->last = communicator->points[number - 1] = point;
    communicator->shared->members[communicator->rank].enqueued = number;
  };
  return place(communicator, in_words(call), stream, std::move(part));
}

}  // namespace nccl
