// Messages from one rank to another: a send ends when its receiver has read it, as NCCL's larger ones do.
#include <cstring>

#include "communicator.h"
#include "counts.h"
#include "runtime.h"

namespace nccl {

namespace {

void raise_to(std::atomic<uint64_t>& value, uint64_t number) {
  uint64_t before = value;
  while (before < number && !value.compare_exchange_weak(before, number)) {}
}

using Points = std::vector<queues::Point>;

Part part_of(Communicator* communicator, Points& points, uint64_t number, std::string peer, std::function<bool()> advance) {
  Part part;
  part.advance = std::move(advance);
  part.waits_for = [peer] { return peer; };
  part.placed = [communicator, &points, number](queues::Point point) {
    std::lock_guard<std::mutex> lock(communicator->mutex);
    points[number - 1] = point;
  };
  return part;
}

uint64_t next(Communicator* communicator, uint64_t& count, Points& points) {
  std::lock_guard<std::mutex> lock(communicator->mutex);
  points.emplace_back();
  return ++count;
}

}  // namespace

Result enqueue_send(Communicator* communicator, const void* from, size_t bytes, int peer, void* stream) {
  if (communicator->is_aborted) return REMOTE;
  without_gpu_count(counts::COLLECTIVES);
  if (runtime::is_null()) return OK;
  if (bytes > board::LETTER) return BAD_ARGUMENT;
  auto& points = communicator->sent[peer];
  uint64_t number = next(communicator, communicator->sends[peer], points);
  auto advance = [=] {
    auto& mail = communicator->shared->mail[communicator->rank][peer];
    if (communicator->is_aborted) return true;
    if (mail.written < number) {
      if (mail.written + 1 < number || mail.read + 1 < number) return false;
      memcpy(communicator->shared.letter(communicator->rank, peer), from, bytes);
      mail.bytes = bytes;
      mail.written = number;
    }
    raise_to(mail.demanded_read, number);
    return mail.read >= number;
  };
  std::string whom = "rank " + std::to_string(peer) + " to read message " + std::to_string(number);
  return place(communicator, "a send", stream, part_of(communicator, points, number, whom, advance));
}

Result enqueue_receive(Communicator* communicator, void* into, size_t bytes, int peer, void* stream) {
  if (communicator->is_aborted) return REMOTE;
  without_gpu_count(counts::COLLECTIVES);
  if (runtime::is_null()) return OK;
  auto& points = communicator->received[peer];
  uint64_t number = next(communicator, communicator->receives[peer], points);
  auto advance = [=] {
    auto& mail = communicator->shared->mail[peer][communicator->rank];
    if (communicator->is_aborted) return true;
    raise_to(mail.demanded_write, number);
    if (mail.written < number || mail.read + 1 < number) return false;
    if (mail.bytes != bytes) {
      queues::fail("a message of " + std::to_string(mail.bytes) + " bytes is received as one of " + std::to_string(bytes));
      return false;
    }
    memcpy(into, communicator->shared.letter(peer, communicator->rank), bytes);
    mail.read = number;
    return true;
  };
  std::string whom = "rank " + std::to_string(peer) + " to send message " + std::to_string(number);
  return place(communicator, "a receive", stream, part_of(communicator, points, number, whom, advance));
}

}  // namespace nccl
