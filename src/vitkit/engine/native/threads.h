// A function goes in, and is run by a team of threads at once, each of which knows its number.
//
// The threads wait a moment for more work, for a batch is seldom the last, and then sleep. They do not survive a fork:
// the child makes its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sched.h>
#endif

namespace vitkit {

inline void breathe() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits until `ready`; after a while it lets others run in between.
template <class Ready>
void wait_for(Ready ready) {
    for (int turn = 0; !ready(); turn++) {
        breathe();
        if (turn > 512) std::this_thread::yield();
    }
}

// A place where all of a team wait for the last of them.
class Barrier {
  public:
    void reset(int members) { members_ = members, arrived_ = 0; }
    void wait() {
        if (members_ == 1) return;
        const int round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
        } else {
            wait_for([&] { return round_.load(std::memory_order_acquire) != round; });
        }
    }

  private:
    int members_ = 1;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
};

// One thread's place in a team.
struct Member {
    int number, members;
    Barrier* barrier;

    void wait() const { barrier->wait(); }
    // This member's part of 0…count, whole multiples of `step` but for the end.
    void part(size_t count, size_t step, size_t& first, size_t& last) const {
        const size_t pieces = (count + step - 1) / step;
        first = pieces * static_cast<size_t>(number) / static_cast<size_t>(members) * step;
        last = pieces * static_cast<size_t>(number + 1) / static_cast<size_t>(members) * step;
        last = last < count ? last : count;
    }
};

class Pool {
  public:
    // Held by whoever uses the threads and what belongs to them; one caller at a time.
    std::mutex& turn() { return callers_; }

    // Held while room to work in is made, and through a fork: a child must not find it half made.
    std::mutex& growing() { return growing_; }

    // Runs `job` with numbers 0…threads - 1, 0 on the caller's own thread; if there are more, it must be its turn.
    void run(int threads, const std::function<void(int)>& job) {
        if (threads > 1) {
            while (static_cast<int>(workers_.size()) < threads - 1) start();
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                job_ = &job, wanted_ = threads - 1;
                left_.store(threads - 1, std::memory_order_relaxed);
                round_.fetch_add(1, std::memory_order_release);
            }
            if (asleep_.load() > 0) wake_.notify_all();
        }
        job(0);
        if (threads > 1) wait_for([&] { return left_.load(std::memory_order_acquire) == 0; });
    }

  private:
    void start() {
        const int number = static_cast<int>(workers_.size()) + 1;
        const unsigned seen = round_.load();
        workers_.emplace_back([this, number, seen] { work(number, seen); });
        workers_.back().detach();  // they last as long as the process
    }

    void work(int number, unsigned seen) {
        while (true) {
            for (int turn = 0; turn < 4000 && round_.load(std::memory_order_acquire) == seen; turn++) breathe();
            if (round_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                asleep_++;
                wake_.wait(lock, [&] { return round_.load() != seen; });
                asleep_--;
            }
            const std::function<void(int)>* job;
            int wanted;
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                seen = round_.load(), job = job_, wanted = wanted_;
            }
            if (number > wanted) continue;
            (*job)(number);
            left_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::mutex callers_, growing_, mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    const std::function<void(int)>* job_ = nullptr;
    int wanted_ = 0;
    std::atomic<int> asleep_{0};
    alignas(64) std::atomic<unsigned> round_{0};
    alignas(64) std::atomic<int> left_{0};
};

inline std::atomic<Pool*>& current_pool() {
    static std::atomic<Pool*> pool{nullptr};
    return pool;
}

// The process's threads. Never destroyed: workers may outlive whatever would do it, and in a forked child they are gone.
inline Pool& pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        current_pool() = new Pool;
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork([] { current_pool().load()->growing().lock(); },
                       [] { current_pool().load()->growing().unlock(); }, [] { current_pool() = new Pool; });
#endif
    });
    return *current_pool();
}

}  // namespace vitkit
