// One thread for each task: the trainer's parallelism is over images, so what a task calls must not split again.
#pragma once

namespace efla::train {

// Keeps LibTorch, OpenMP and OpenBLAS to the calling thread; every thread that runs tasks calls it first (free from the
// second call on). LibTorch's and OpenMP's settings belong to the thread, OpenBLAS's to the process.
void compute_on_this_thread_only();

}  // namespace efla::train
