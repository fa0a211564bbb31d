#include "efla/torch/one_thread.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace efla::libtorch {
namespace {

// Debian's LibTorch calls whichever BLAS is installed. OpenBLAS starts threads of its own, of which neither LibTorch
// nor OpenMP knows. The function is looked up by name, because another BLAS does not have it.
void limit_openblas() {
  using SetThreads = void (*)(int);
  if (const auto set_threads = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "openblas_set_num_threads"))) {
    set_threads(1);
  }
}

// Returns whether the system gives this process `bytes` more of address space.
bool has_room(std::size_t bytes) {
  void* const room = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return room != MAP_FAILED && munmap(room, bytes) == 0;
}

}  // namespace

void reserve_product_buffers(int threads) {
  using Allocate = void* (*)(int);
  using Release = void (*)(void*);
  const auto allocate = reinterpret_cast<Allocate>(dlsym(RTLD_DEFAULT, "blas_memory_alloc"));
  const auto release = reinterpret_cast<Release>(dlsym(RTLD_DEFAULT, "blas_memory_free"));
  if (allocate == nullptr || release == nullptr) return;
  constexpr int kMost = 48;                              // OpenBLAS has room for at least 50 buffers
  constexpr std::size_t kRoom = std::size_t{256} << 20;  // twice the size of a buffer
  std::vector<void*> buffers;
  bool enough = true;
  for (int i = 0; enough && i < std::min(threads, kMost); ++i) {
    enough = has_room(kRoom);
    if (enough) buffers.push_back(allocate(0));
  }
  for (void* buffer : buffers) release(buffer);  // to OpenBLAS, which keeps it
  if (!enough) {
    throw std::runtime_error("not enough memory for matrix products on " + std::to_string(threads) +
                             (threads == 1 ? " thread" : " threads"));
  }
}

void run_tasks(ThreadPool& pool, const at::Device& device, std::int64_t count,
               const std::function<void(std::int64_t task)>& task) {
  if (!device.is_cpu()) {
    for (std::int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  pool.run(count, [&](std::int64_t i, int) {
    compute_on_this_thread_only();
    task(i);
  });
}

void compute_on_this_thread_only() {
  thread_local bool done = false;
  if (done) return;
  static std::once_flag once;
  std::call_once(once, limit_openblas);
  at::set_num_threads(1);
  done = true;
}

}  // namespace efla::libtorch
