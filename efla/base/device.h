// The device in whose memory an operator's tensors lie.
#pragma once

#include <string>

namespace efla {

struct Device {
  enum class Kind { cpu, cuda };

  Kind kind = Kind::cpu;
  int index = 0;  // of the GPU

  constexpr bool is_cpu() const { return kind == Kind::cpu; }
};

// "the CPU" or, for example, "cuda:0".
inline std::string name_of(const Device& device) {
  return device.is_cpu() ? "the CPU" : "cuda:" + std::to_string(device.index);
}

}  // namespace efla
