#include <string>
#include <vector>

#include "efla/io/safetensors/safetensors_folder.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {
namespace {

constexpr const char* kShards[]{"a.safetensors", "b.safetensors"};

// Writes two shards with two tensors each: a.safetensors has a.0 and a.1, b.safetensors has b.0 and b.1.
void write_shards(const ScratchFolder& folder) {
  const std::uint8_t number[sizeof(float)]{};
  for (const std::string shard : kShards) {
    std::vector<io::NamedTensor> tensors;
    for (const char* end : {".0", ".1"}) {
      tensors.push_back({shard.substr(0, 1) + end, io::TensorType::F32, {1}, number});
    }
    io::write_safetensors(folder.path() / shard, tensors);
  }
}

}  // namespace

void weights_index(io::ByteView bytes) {
  static const ScratchFolder folder;
  static const bool written = (write_shards(folder), true);
  static_cast<void>(written);
  folder.write("model.safetensors.index.json", bytes);
  std::vector<std::string> names;
  bool missing = false;
  const auto read = [&] {
    try {
      const io::SafetensorsFolder weights(folder.path());
      names = weights.names();
      for (const auto& name : names) {
        const auto* file = weights.file_with(name);
        require(file != nullptr && file->find(name) != nullptr, "a file that has the tensor");
      }
    } catch (const IoError& error) {  // the index may name a file that does not exist
      missing = error.kind() == IoError::Kind::missing;
      if (!missing) throw;
    }
  };
  if (!accepts(read, bytes.size()) || missing) return;
  // An index may leave a whole shard out, but not a part of one.
  require(names.size() == 0 || names.size() == 2 || names.size() == 4, "all tensors of a shard");
}

}  // namespace efla::fuzz
