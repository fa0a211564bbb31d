// One thread for each task: where work is shared out by the program (training by examples, generating by the rows of a
// product), what a task calls must not split again.
#pragma once

namespace efla::autograd {

// Keeps LibTorch, OpenMP and OpenBLAS to the calling thread; every thread that runs tasks calls it first (free from the
// second call on). LibTorch's and OpenMP's settings belong to the thread, OpenBLAS's to the process.
void compute_on_this_thread_only();

}  // namespace efla::autograd
