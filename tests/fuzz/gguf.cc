#include "efla/io/gguf/gguf.h"

#include <set>

#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {

void gguf(io::ByteView bytes) {
  io::GgufContent content;
  if (!accepts([&] { content = io::parse_gguf(bytes, "input"); }, bytes.size())) return;
  std::uint64_t data = 0;
  std::set<std::string> names;
  for (const auto& tensor : content.tensors) {
    std::int64_t elements = 1;
    for (const auto extent : tensor.shape) elements *= extent;
    require(elements % tensor.type->elements == 0, "whole blocks");
    const auto size = elements / tensor.type->elements * tensor.type->bytes;
    require(static_cast<std::uint64_t>(size) == tensor.bytes.size(), "bytes that fit the shape");
    require(names.insert(tensor.name).second, "names that differ");
    data += tensor.bytes.size();
  }
  require(data <= bytes.size(), "tensors that do not overlap");
}

}  // namespace efla::fuzz
