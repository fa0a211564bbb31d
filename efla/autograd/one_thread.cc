#include "efla/autograd/one_thread.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <mutex>

namespace efla::autograd {
namespace {

// Debian's LibTorch calls whichever BLAS is installed. OpenBLAS starts threads of its own, of which neither LibTorch
// nor OpenMP knows; asked for by name because another BLAS has no such function.
void limit_openblas() {
  using SetThreads = void (*)(int);
  if (const auto set_threads = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "openblas_set_num_threads"))) {
    set_threads(1);
  }
}

}  // namespace

void compute_on_this_thread_only() {
  thread_local bool done = false;
  if (done) return;
  static std::once_flag once;
  std::call_once(once, limit_openblas);
  at::set_num_threads(1);
  done = true;
}

}  // namespace efla::autograd
