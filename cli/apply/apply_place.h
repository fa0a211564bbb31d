// Where efla apply has the tensors of a call: in the host's memory, or on a GPU as long as the object lives.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "efla/base/device.h"
#include "efla/base/view.h"
#include "efla/ops/gpu.h"

namespace efla::cli {

class Place {
 public:
  explicit Place(const Device& device) : device_(device) {}

  // Return the contiguous host view, or a view of GPU memory: with a copy of an input, or for an output, which
  // fetch_outputs copies back. An absent view stays absent.
  template <class T, int Rank>
  View<const T, Rank> input(View<T, Rank> host) {
    if (host && !device_.is_cpu()) {
      copies_.emplace_back(device_, host.size() * sizeof(T));
      copies_.back().write(host.data);
      host.data = static_cast<T*>(copies_.back().data());
    }
    return host;
  }
  template <class T, int Rank>
  View<T, Rank> output(View<T, Rank> host) {
    if (host && !device_.is_cpu()) {
      results_.emplace_back(GpuMemory(device_, host.size() * sizeof(T)), host.data);
      host.data = static_cast<T*>(results_.back().first.data());
    }
    return host;
  }

  // Waits for the calls and copies the outputs to the host.
  void fetch_outputs() const {
    for (const auto& [memory, host] : results_) memory.read(host);
  }

 private:
  Device device_;
  std::vector<GpuMemory> copies_;
  std::vector<std::pair<GpuMemory, void*>> results_;
};

}  // namespace efla::cli
