// One rank's end of a communicator. Calls return at once; ranks meet when their streams get there.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "board.h"
#include "queues.h"

namespace nccl {

enum Result { OK = 0, SYSTEM = 2, INTERNAL = 3, BAD_ARGUMENT = 4, BAD_USAGE = 5, REMOTE = 6 };
enum Kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE, ALL_TO_ALL };

// One step of an operation: true: it has ended.
struct Part {
  std::function<bool()> advance;
  std::function<std::string()> waits_for;
  std::function<void(queues::Point)> placed;  // it is at this point of its stream
};

struct Communicator {
  Communicator(const std::string& name, int rank, int size, int device);

  board::Shared shared;
  std::string name;
  int rank, size;
  std::atomic<bool> is_aborted{false}, has_failed{false};

  std::mutex mutex;  // of what follows
  uint64_t enqueued = 0;
  queues::Point last;                   // of the collectives so far
  std::vector<queues::Point> points;    // of collectives, by number - 1
  std::vector<std::vector<queues::Point>> sent, received;  // by peer, then by number - 1
  std::vector<uint64_t> sends, receives;                   // how many, by peer

  void poll();
  std::string report();

 private:
  uint64_t seen_ = 0;
};

std::string last_error();
void set_last_error(const std::string& text);

Result enqueue_collective(Communicator*, board::Call call, const void* send, size_t bytes, void* stream,
                          std::function<void()> finish);
Result enqueue_send(Communicator*, const void* from, size_t bytes, int peer, void* stream);
Result enqueue_receive(Communicator*, void* into, size_t bytes, int peer, void* stream);

// Behind `begin_group`, calls are put off until `end_group`, which makes one operation of each stream's.
void begin_group();
Result end_group();
Result place(Communicator*, const std::string& name, void* stream, Part part);

}  // namespace nccl
