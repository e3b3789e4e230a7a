// Thread pool that runs one function on several threads at once.
//
// Idle workers spin briefly before they sleep, because batches usually follow each other. Threads do not survive a fork;
// a child process creates its own pool.
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

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spin until `predicate` holds, yielding after a while.
template <class Predicate>
void spin_until(Predicate predicate) {
    for (int spins = 0; !predicate(); spins++) {
        cpu_pause();
        if (spins > 512) std::this_thread::yield();
    }
}

// Reusable spin barrier.
class Barrier {
  public:
    void reset(int threads) { threads_ = threads, arrived_ = 0; }
    void wait() {
        if (threads_ == 1) return;
        const int round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
        } else {
            spin_until([&] { return round_.load(std::memory_order_acquire) != round; });
        }
    }

  private:
    int threads_ = 1;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
};

// Index of one thread among those that share a computation.
struct ThreadSlice {
    int index, threads;
    Barrier* barrier;

    void wait() const { barrier->wait(); }
    // Compute this thread's share [first, last) of [0, count), in multiples of `granularity` except at the end.
    void slice(size_t count, size_t granularity, size_t& first, size_t& last) const {
        const size_t chunks = (count + granularity - 1) / granularity;
        first = chunks * static_cast<size_t>(index) / static_cast<size_t>(threads) * granularity;
        last = chunks * static_cast<size_t>(index + 1) / static_cast<size_t>(threads) * granularity;
        last = last < count ? last : count;
    }
};

class ThreadPool {
  public:
    // Held by the caller that uses the worker threads and their buffers.
    std::mutex& caller_mutex() { return caller_mutex_; }

    // Held while buffers are allocated and during a fork, so that a child never sees an incomplete allocation.
    std::mutex& fork_mutex() { return fork_mutex_; }

    // Run `job(0…threads - 1)`, index 0 on the calling thread. With several threads the caller must hold caller_mutex().
    void run(int threads, const std::function<void(int)>& job) {
        if (threads > 1) {
            while (static_cast<int>(workers_.size()) < threads - 1) start_worker();
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                job_ = &job, active_ = threads - 1;
                remaining_.store(threads - 1, std::memory_order_relaxed);
                round_.fetch_add(1, std::memory_order_release);
            }
            if (sleeping_.load() > 0) wake_.notify_all();
        }
        job(0);
        if (threads > 1) spin_until([&] { return remaining_.load(std::memory_order_acquire) == 0; });
    }

  private:
    void start_worker() {
        const int index = static_cast<int>(workers_.size()) + 1;
        const unsigned last_round = round_.load();
        workers_.emplace_back([this, index, last_round] { worker_loop(index, last_round); });
        workers_.back().detach();  // workers live as long as the process
    }

    void worker_loop(int index, unsigned last_round) {
        while (true) {
            for (int spins = 0; spins < 4000 && round_.load(std::memory_order_acquire) == last_round; spins++)
                cpu_pause();
            if (round_.load(std::memory_order_acquire) == last_round) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_++;
                wake_.wait(lock, [&] { return round_.load() != last_round; });
                sleeping_--;
            }
            const std::function<void(int)>* job;
            int active;
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                last_round = round_.load(), job = job_, active = active_;
            }
            if (index > active) continue;
            (*job)(index);
            remaining_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::mutex caller_mutex_, fork_mutex_, mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    const std::function<void(int)>* job_ = nullptr;
    int active_ = 0;
    std::atomic<int> sleeping_{0};
    alignas(64) std::atomic<unsigned> round_{0};
    alignas(64) std::atomic<int> remaining_{0};
};

inline std::atomic<ThreadPool*>& current_pool() {
    static std::atomic<ThreadPool*> pool{nullptr};
    return pool;
}

// The pool of this process. Never destroyed: workers may outlive static destructors, and a forked child has none.
inline ThreadPool& pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        current_pool() = new ThreadPool;
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork([] { current_pool().load()->fork_mutex().lock(); },
                       [] { current_pool().load()->fork_mutex().unlock(); }, [] { current_pool() = new ThreadPool; });
#endif
    });
    return *current_pool();
}

}  // namespace vitkit
