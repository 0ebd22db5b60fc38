// Streams whose operations are carried out as late as waits allow.
//
// A host that enqueues an operation goes on at once, and nothing runs. An operation runs when somebody waits for it: the
// host (for a stream, an event, a blocking copy), an operation of another stream that was told to come after it, or
// another rank, whose collective needs this rank's part. Then it runs behind all that comes before it in its stream, and
// not a moment earlier. So what a program only hopes to be done by now is not done, and wrong numbers show it.
//
// One thread of the process, the device, carries operations out.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace queues {

struct Stream;

// The place in a stream behind its first `position` operations.
struct Point {
  Stream* stream = nullptr;
  uint64_t position = 0;
};

struct Operation {
  std::string name;
  std::vector<Point> needs;             // what ends first, beside all that comes before in the stream
  std::function<bool()> advance;        // carries it out; false: it waits for another rank, ask again
  std::function<std::string()> waits_for;  // in words; empty: for no other rank
};

Stream* make_stream(int device, int priority);
Stream* default_stream(int device);
int device_of(const Stream* stream);
int priority_of(const Stream* stream);

// Returns at once.
Point enqueue(Stream* stream, Operation operation);
uint64_t enqueued_here();  // how many operations, by this thread
Point end_of(Stream* stream);
bool has_ended(const Point& point);

// The host waits; false after a failure, such as a wait in which nothing moved until the deadline.
bool wait(const std::vector<Point>& points);
// As `wait` for all that was enqueued on the device so far; -1: on all devices.
bool wait_for_device(int device);

// For another rank's sake: the device carries out all up to there, and nobody here waits.
void demand(const Point& point);
// Called by the device again and again; there it learns what other ranks demand.
void add_poll(std::function<void()> poll);
// Something that another rank did moves operations here: no deadline passes meanwhile.
void note_progress();

// The first failure stays; every wait then fails.
void fail(const std::string& text);
std::string failure();
// Adds a few lines to the report of a wait that ends at its deadline.
void add_report(std::function<std::string()> report);

}  // namespace queues
