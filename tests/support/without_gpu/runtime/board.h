// Memory that the ranks of one communicator share: what each of them has come to, and what it sends.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace board {

constexpr int MOST_RANKS = 16;
constexpr size_t SLOT = 64ull << 20;  // bytes of one collective of one rank; pages that nobody touches take none
constexpr size_t LETTER = 16ull << 20;

// What a rank asks of a collective; the ranks' have to be equal.
struct Call {
  int32_t kind, type, reduction, root;
  uint64_t count;
  bool operator==(const Call& other) const {
    return kind == other.kind && type == other.type && reduction == other.reduction && root == other.root &&
           count == other.count;
  }
};

struct Member {
  std::atomic<uint64_t> enqueued, arrived, ended;  // how many collectives
  std::atomic<uint64_t> demanded;                  // by the other ranks
  std::atomic<int> device, process;
  std::atomic<int> color, key;                     // of a split
  Call calls[2];
};

// From one rank to another.
struct Mailbox {
  std::atomic<uint64_t> written, read;                // how many messages
  std::atomic<uint64_t> demanded_write, demanded_read;  // by the other side
  uint64_t bytes;
};

struct Board {
  std::atomic<uint64_t> meetings;
  Member members[MOST_RANKS];
  Mailbox mail[MOST_RANKS][MOST_RANKS];
};

class Shared {
 public:
  // Opens or makes it, by name. Throws std::runtime_error.
  Shared(const std::string& name, int rank, int size);

  // A barrier of the hosts, with a deadline; false: not all came.
  bool meet();
  void unlink();

  Board* operator->() { return board_; }
  // A rank's bytes of its collective number n.
  char* slot(int rank, uint64_t number) { return slots_ + (2 * rank + number % 2) * SLOT; }
  char* letter(int from, int to) { return slots_ + 2 * size_ * SLOT + (from * size_ + to) * LETTER; }

 private:
  Board* board_;
  char* slots_;
  std::string name_;
  int size_;
  uint64_t met_ = 0;
};

}  // namespace board
