#include "queues.h"

#include <dlfcn.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <unistd.h>

namespace queues {

struct Stream {
  int device, number, priority;
  std::deque<Operation> waiting;
  uint64_t enqueued = 0, ended = 0, demanded = 0;
};

namespace {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

// Never destroyed: the device runs until the process is gone.
struct Device {
  std::mutex mutex;
  std::condition_variable work, progress;
  std::deque<Stream*> streams;
  std::map<int, Stream*> defaults;
  std::vector<std::function<void()>> polls;
  std::vector<std::function<std::string()>> reports;
  std::string failure;
  uint64_t moves = 0;
  bool is_running = false;  // an operation, now
  std::thread::id thread;
  bool has_started = false;
};

Device& device() {
  static Device* one = new Device;
  return *one;
}

std::chrono::seconds deadline() {
  const char* text = getenv("WITHOUT_GPU_SECONDS");
  return std::chrono::seconds(text ? atoi(text) : 120);
}

// An operation may need the lock of Python's interpreter, which who waits here may hold.
class WithoutInterpreterLock {
 public:
  WithoutInterpreterLock() {
    auto is_up = (int (*)())dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    auto is_held = (int (*)())dlsym(RTLD_DEFAULT, "PyGILState_Check");
    auto release = (void* (*)())dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    if (is_up && is_up() && is_held() == 1) state_ = release();
  }
  ~WithoutInterpreterLock() {
    if (state_) ((void (*)(void*))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"))(state_);
  }

 private:
  void* state_ = nullptr;
};

std::string name_of(const Stream* stream) {
  std::ostringstream text;
  text << "stream " << stream->number << " of GPU " << stream->device;
  return text.str();
}

// Under the lock.
std::string report() {
  std::ostringstream text;
  for (Stream* stream : device().streams) {
    if (stream->waiting.empty()) continue;
    const Operation& first = stream->waiting.front();
    text << "\n  " << name_of(stream) << ": " << stream->waiting.size() << " operations wait, the first is " << first.name;
    if (stream->demanded <= stream->ended) text << ", for which nobody waits";
    if (stream->demanded > stream->ended && first.waits_for) text << ", which waits for " << first.waits_for();
    for (const Point& need : first.needs)
      if (need.stream->ended < need.position)
        text << ", behind operation " << need.position << " of " << name_of(need.stream) << ", where " << need.stream->ended
             << " have ended";
  }
  for (auto& more : device().reports) text << more();
  return text.str();
}

void set_failure(const std::string& text) {
  if (!device().failure.empty()) return;
  device().failure = text;
  fprintf(stderr, "[GPU stand-in, process %d] %s\n", getpid(), text.c_str());
  const char* path = getenv("WITHOUT_GPU_REPORT");
  if (FILE* file = path ? fopen(path, "a") : nullptr) {
    fprintf(file, "process %d: %s\n", getpid(), text.c_str());
    fclose(file);
  }
  device().progress.notify_all();
}

thread_local uint64_t here = 0;

// An operation that comes late finds memory gone that somebody gave back too early.
char running[256];
struct sigaction before;
void tell_of_crash(int number, siginfo_t* info, void* context) {
  if (std::this_thread::get_id() == device().thread && running[0]) {
    char text[400];
    int length = snprintf(text, sizeof text, "[GPU stand-in, process %d] %s uses memory at %p, which is gone\n", getpid(),
                          running, info->si_addr);
    (void)!write(2, text, length);
  }
  sigaction(SIGSEGV, &before, nullptr);  // the same access again, for whoever was there before
}

bool carry_out(Operation& operation) {
  snprintf(running, sizeof running, "%s", operation.name.c_str());
  try {
    return operation.advance();
  } catch (const std::exception& error) {
    fail(operation.name + ": " + error.what());
    return false;
  }
}

// Under the lock: whether something moved.
bool serve(Stream* stream, Lock& lock, bool& waits) {
  bool moved = false;
  while (stream->ended < stream->demanded && !stream->waiting.empty() && device().failure.empty()) {
    Operation& first = stream->waiting.front();  // a deque's elements stay where they are
    bool is_ready = true;
    for (const Point& need : first.needs) {
      if (need.stream->ended >= need.position) continue;
      is_ready = false;
      if (need.stream->demanded < need.position) {
        need.stream->demanded = need.position;
        moved = true;
      }
    }
    if (!is_ready) break;
    device().is_running = true;
    lock.unlock();
    bool has_ended = carry_out(first);
    lock.lock();
    device().is_running = false;
    if (!has_ended) {
      waits = true;
      break;
    }
    Operation done = std::move(first);
    stream->waiting.pop_front();
    stream->ended++;
    device().moves++;
    moved = true;
    device().progress.notify_all();
    lock.unlock();
    done = Operation();  // what it holds may want the interpreter's lock to be freed
    lock.lock();
  }
  return moved;
}

void run() {
  Lock lock(device().mutex);
  device().thread = std::this_thread::get_id();
  for (;;) {
    bool moved = false, waits = false;
    for (size_t i = 0; i < device().polls.size(); i++) {
      auto poll = device().polls[i];
      lock.unlock();
      poll();
      lock.lock();
    }
    for (size_t i = 0; i < device().streams.size(); i++) moved |= serve(device().streams[i], lock, waits);
    if (moved) continue;
    if (waits || !device().polls.empty())
      device().work.wait_for(lock, std::chrono::microseconds(waits ? 100 : 500));
    else
      device().work.wait(lock);
  }
}

// Under the lock. Not before the first operation: processes of tests are forked.
void start() {
  if (device().has_started) return;
  device().has_started = true;
  struct sigaction action = {};
  action.sa_sigaction = tell_of_crash;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &before);
  std::thread(run).detach();
}

Stream* add_stream(int of, int priority) {
  auto* stream = new Stream{of, (int)device().streams.size(), priority};
  device().streams.push_back(stream);
  return stream;
}

}  // namespace

Stream* make_stream(int of, int priority) {
  Lock lock(device().mutex);
  return add_stream(of, priority);
}

Stream* default_stream(int of) {
  Lock lock(device().mutex);
  auto& stream = device().defaults[of];
  if (!stream) stream = add_stream(of, 0);
  return stream;
}

int device_of(const Stream* stream) { return stream->device; }
int priority_of(const Stream* stream) { return stream->priority; }

Point enqueue(Stream* stream, Operation operation) {
  Lock lock(device().mutex);
  start();
  here++;
  stream->waiting.push_back(std::move(operation));
  return {stream, ++stream->enqueued};
}

uint64_t enqueued_here() { return here; }

Point end_of(Stream* stream) {
  Lock lock(device().mutex);
  return {stream, stream->enqueued};
}

bool has_ended(const Point& point) {
  Lock lock(device().mutex);
  return !point.stream || point.stream->ended >= point.position;
}

bool wait(const std::vector<Point>& points) {
  if (std::all_of(points.begin(), points.end(), has_ended)) return failure().empty();
  WithoutInterpreterLock without;
  Lock lock(device().mutex);
  if (std::this_thread::get_id() == device().thread) {
    set_failure("an operation of the device waits for the device");
    return false;
  }
  for (const Point& point : points) {
    if (!point.stream) continue;
    if (point.stream->demanded < point.position) point.stream->demanded = point.position;
    device().work.notify_one();
    uint64_t moves = device().moves;
    auto end = Clock::now() + deadline();
    while (point.stream->ended < point.position && device().failure.empty()) {
      device().progress.wait_for(lock, std::chrono::milliseconds(100));
      if (moves != device().moves || (device().is_running && !point.stream->waiting.front().waits_for)) {
        moves = device().moves;
        end = Clock::now() + deadline();
      } else if (Clock::now() > end && point.stream->ended < point.position) {
        set_failure("a wait for " + name_of(point.stream) + " ended at its deadline; who waits for whom:" + report());
      }
    }
  }
  return device().failure.empty();
}

bool wait_for_device(int of) {
  std::vector<Point> points;
  {
    Lock lock(device().mutex);
    for (Stream* stream : device().streams)
      if (of < 0 || stream->device == of) points.push_back({stream, stream->enqueued});
  }
  return wait(points);
}

void demand(const Point& point) {
  Lock lock(device().mutex);
  if (point.stream && point.stream->demanded < point.position) {
    point.stream->demanded = point.position;
    device().work.notify_one();
  }
}

void add_poll(std::function<void()> poll) {
  Lock lock(device().mutex);
  start();
  device().polls.push_back(std::move(poll));
  device().work.notify_one();
}

void add_report(std::function<std::string()> more) {
  Lock lock(device().mutex);
  device().reports.push_back(std::move(more));
}

void note_progress() {
  Lock lock(device().mutex);
  device().moves++;
}

void fail(const std::string& text) {
  Lock lock(device().mutex);
  set_failure(text);
}

std::string failure() {
  Lock lock(device().mutex);
  return device().failure;
}

}  // namespace queues
