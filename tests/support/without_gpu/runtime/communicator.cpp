#include "communicator.h"

#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "runtime.h"

namespace nccl {

namespace {

struct Waiting {
  Communicator* communicator;
  std::string name;
  void* stream;
  Part part;
};
thread_local int depth = 0;
thread_local std::vector<Waiting> group;
thread_local std::string error;

queues::Point& nth(std::vector<queues::Point>& points, uint64_t number) { return points[number - 1]; }

void demand(std::vector<queues::Point>& points, uint64_t number) {
  number = std::min<uint64_t>(number, points.size());
  if (number) queues::demand(nth(points, number));
}

// One operation of several parts, which go on beside each other.
Result enqueue_parts(void* stream, std::vector<Waiting> waiting) {
  struct Parts {
    std::vector<Waiting> left;
  };
  auto parts = std::make_shared<Parts>(Parts{waiting});
  queues::Operation operation;
  for (auto& each : waiting) {
    operation.name += (operation.name.empty() ? "" : ", ") + each.name;
    std::lock_guard<std::mutex> lock(each.communicator->mutex);
    if (each.communicator->last.stream) operation.needs.push_back(each.communicator->last);
  }
  operation.advance = [parts] {
    auto& left = parts->left;
    left.erase(std::remove_if(left.begin(), left.end(), [](Waiting& each) { return each.part.advance(); }), left.end());
    return left.empty();
  };
  operation.waits_for = [parts] { return parts->left.empty() ? std::string("nobody") : parts->left[0].part.waits_for(); };
  queues::Point point = queues::enqueue(runtime::stream_of((cudaStream_t)stream), std::move(operation));
  for (auto& each : waiting) each.part.placed(point);
  return OK;
}

}  // namespace

Communicator::Communicator(const std::string& called, int rank, int size, int device)
    : shared(called, rank, size), name(called), rank(rank), size(size), sent(size), received(size), sends(size),
      receives(size) {
  shared->members[rank].device = device;
  shared->members[rank].process = getpid();
}

void Communicator::poll() {
  if (is_aborted) return;
  uint64_t seen = 0;
  for (int i = 0; i < size; i++) {
    auto& member = shared->members[i];
    seen += member.enqueued + member.arrived + member.ended;
    for (int j = 0; j < size; j++) seen += shared->mail[i][j].written + shared->mail[i][j].read;
  }
  if (seen != seen_) queues::note_progress();
  seen_ = seen;
  std::lock_guard<std::mutex> lock(mutex);
  demand(points, shared->members[rank].demanded);
  for (int peer = 0; peer < size; peer++) {
    demand(sent[peer], shared->mail[rank][peer].demanded_write);
    demand(received[peer], shared->mail[peer][rank].demanded_read);
  }
}

std::string Communicator::report() {
  std::ostringstream text;
  text << "\n  communicator " << name << ", here rank " << rank << " of " << size << ":";
  for (int i = 0; i < size; i++) {
    auto& member = shared->members[i];
    text << "\n    rank " << i << " (process " << member.process << "): " << member.enqueued << " collectives enqueued, "
         << member.arrived << " begun, " << member.ended << " ended";
    for (int j = 0; j < size; j++) {
      auto& mail = shared->mail[i][j];
      if (mail.written || mail.demanded_write)
        text << "; to rank " << j << " " << mail.written << " messages sent, " << mail.read << " read, " << mail.demanded_write
             << " asked for";
    }
  }
  return text.str();
}

std::string last_error() { return error; }
void set_last_error(const std::string& text) { error = text; }

void begin_group() { depth++; }

Result end_group() {
  if (--depth) return OK;
  std::vector<Waiting> all;
  all.swap(group);
  while (!all.empty()) {
    void* stream = all[0].stream;
    auto rest = std::stable_partition(all.begin(), all.end(), [&](Waiting& each) { return each.stream == stream; });
    enqueue_parts(stream, {all.begin(), rest});
    all.erase(all.begin(), rest);
  }
  return OK;
}

Result place(Communicator* communicator, const std::string& name, void* stream, Part part) {
  Waiting waiting{communicator, name, stream, std::move(part)};
  if (!depth) return enqueue_parts(stream, {waiting});
  group.push_back(std::move(waiting));
  return OK;
}

}  // namespace nccl
