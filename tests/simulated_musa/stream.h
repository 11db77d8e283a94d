// Streams and events of the simulated device: one FIFO worker thread per stream, no torch in here.
//
// A late stream runs an operation only when somebody needs it: a host wait on something behind it, or another
// stream's worker that has reached a wait for it. So every operation is delayed as far as the recorded events
// allow, and a missing wait gives wrong bytes on every run instead of on some.
#pragma once

#include <Python.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

namespace simulated {

using Work = std::function<void()>;
using Clock = std::chrono::steady_clock;

constexpr int devices = 2;
constexpr int pool_size = 32;  // streams per priority, handed out in turn

// One lock for all streams: the simulator is small, and this way its locks can't deadlock.
// Everything is leaked on purpose: workers outlive static destructors.
struct Shared {
  std::mutex lock;
  bool stopping = false;
  std::atomic<bool> forked{false};  // no worker survives a fork, and the lock may not either
  double shortest_delay = 0, longest_delay = 0;
  std::mt19937 random;

  Clock::duration next_delay() {
    std::uniform_real_distribution<double> seconds(shortest_delay, longest_delay);
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds(random)));
  }
};

inline Shared& shared() {
  static auto* state = new Shared;
  return *state;
}

// A wait must not hold the interpreter: a worker may need it to drop the last reference to a Python buffer.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutInterpreter() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutInterpreter(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* state_;
};

class Stream {
 public:
  const int device;
  const int64_t id;

  Stream(int device, int64_t id) : device(device), id(id) {}

  // Queue `work`; returns the place behind it. Marks and waits are not delayed, only what stands for device work.
  uint64_t push(Work work, bool delayed = true) {
    refuse_fork();
    std::lock_guard guard(shared().lock);
    if (!std::exchange(started_, true)) std::thread(&Stream::run, this).detach();
    queue_.emplace_back(std::move(work), delayed);
    wake_.notify_one();
    return ++queued_;
  }

  bool passed(uint64_t place) {
    std::lock_guard guard(shared().lock);
    return done_ >= place;
  }

  uint64_t end() {
    std::lock_guard guard(shared().lock);
    return queued_;
  }

  // What another stream's worker does when it reaches a wait: need the place, and sleep until it is passed.
  void await(uint64_t place) {
    refuse_fork();
    std::unique_lock guard(shared().lock);
    needed_ = std::max(needed_, place);
    wake_.notify_one();
    advanced_.wait(guard, [&] { return done_ >= place || shared().stopping; });
  }

  // A host wait; throws what an earlier operation of this stream threw, once.
  void synchronize(uint64_t place) {
    WithoutInterpreter released;
    await(place);
    std::exception_ptr error;
    {
      std::lock_guard guard(shared().lock);
      std::swap(error, error_);
    }
    if (error) std::rethrow_exception(error);
  }

  void set_late(bool late) {
    std::lock_guard guard(shared().lock);
    late_ = late;
    wake_.notify_one();
  }

  // Called with the lock held, when everything stops.
  void wake() {
    wake_.notify_all();
    advanced_.notify_all();
  }

 private:
  static void refuse_fork() {
    if (shared().forked) throw std::runtime_error("Cannot re-initialize MUSA in forked subprocess");
  }

  void run() {
    std::unique_lock guard(shared().lock);
    while (true) {
      wake_.wait(guard, [&] { return shared().stopping || runnable(); });
      if (shared().stopping) return;
      auto [work, delayed] = std::move(queue_.front());
      queue_.pop_front();
      const auto delay = delayed ? shared().next_delay() : Clock::duration::zero();
      guard.unlock();
      if (delay > Clock::duration::zero()) std::this_thread::sleep_for(delay);
      auto error = attempt(work);
      work = nullptr;
      guard.lock();
      if (error && !error_) error_ = error;
      ++done_;
      advanced_.notify_all();
    }
  }

  bool runnable() const { return !queue_.empty() && (!late_ || needed_ > done_); }

  static std::exception_ptr attempt(const Work& work) {
    try {
      work();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  std::condition_variable wake_, advanced_;  // for the worker; for those who wait for it
  std::deque<std::pair<Work, bool>> queue_;
  uint64_t queued_ = 0, done_ = 0, needed_ = 0;
  bool started_ = false, late_ = false;
  std::exception_ptr error_;
};

// Stream 0 is the default one, then the pool of low and the pool of high priority.
inline Stream& stream_at(int device, int64_t id) {
  static auto* all = [] {
    auto* made = new std::deque<std::deque<Stream>>(devices);
    for (int device = 0; device < devices; ++device)
      for (int64_t id = 0; id <= 2 * pool_size; ++id) (*made)[device].emplace_back(device, id);
    return made;
  }();
  return all->at(device).at(id);
}

inline Stream& next_pool_stream(int device, bool high_priority) {
  static std::atomic<uint32_t> handed_out[devices][2];
  const auto turn = handed_out[device][high_priority]++ % pool_size;
  return stream_at(device, 1 + turn + (high_priority ? pool_size : 0));
}

inline void each_stream(int device, const std::function<void(Stream&)>& visit) {
  for (int64_t id = 0; id <= 2 * pool_size; ++id) visit(stream_at(device, id));
}

// One record of an event. Recording again makes a new one, so a wait keeps the place it was given.
struct Mark {
  explicit Mark(Stream& stream) : stream(stream) {}
  Stream& stream;
  uint64_t place = 0;
  Clock::time_point reached = {};

  bool passed() const { return stream.passed(place); }
};

inline double milliseconds(const Mark& start, const Mark& end) {
  return std::chrono::duration<double, std::milli>(end.reached - start.reached).count();
}

struct Event {
  std::shared_ptr<Mark> latest;

  void record(Stream& stream) {
    auto mark = std::make_shared<Mark>(stream);
    mark->place = stream.push([mark] { mark->reached = Clock::now(); }, false);
    latest = std::move(mark);
  }
  void block(Stream& waiter) const {
    waiter.push([mark = latest] { mark->stream.await(mark->place); }, false);
  }
  bool query() const { return latest->passed(); }
  void synchronize() const { latest->stream.synchronize(latest->place); }
};

inline void wait_stream(Stream& waiter, Stream& other) {
  Event event;
  event.record(other);
  event.block(waiter);
}

}  // namespace simulated
