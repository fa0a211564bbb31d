#include "efla/io/safetensors/safetensors.h"

#include <set>

#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {
namespace {

// The tensors fill the file from the end of the header to its own end, one after the other, each with the bytes that
// its shape asks for.
void check(const io::SafetensorsContent& content, io::ByteView bytes) {
  std::uint64_t data = 0;
  for (const auto& tensor : content.tensors) data += tensor.bytes.size();
  require(data <= bytes.size(), "tensors no larger than the file");
  const auto* next = bytes.data() + (bytes.size() - data);
  std::set<std::string> names;
  for (const auto& tensor : content.tensors) {
    require(tensor.bytes.empty() || tensor.bytes.data() == next, "tensors without gap or overlap");
    next += tensor.bytes.size();
    std::uint64_t size = io::type_bytes(tensor.type);
    bool fits = true;
    for (const auto extent : tensor.shape) {
      fits = fits && extent >= 0 && !__builtin_mul_overflow(size, static_cast<std::uint64_t>(extent), &size);
    }
    require(fits && size == tensor.bytes.size(), "bytes that fit the shape");
    require(names.insert(tensor.name).second, "names that differ");
  }
}

}  // namespace

void safetensors(io::ByteView bytes) {
  io::SafetensorsContent content;
  if (accepts([&] { content = io::parse_safetensors(bytes, "input"); }, bytes.size())) check(content, bytes);
}

}  // namespace efla::fuzz
