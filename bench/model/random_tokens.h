// Random tokens to train on.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "efla/base/error.h"
#include "efla/base/random.h"
#include "efla/io/tokens/token_folder.h"

namespace efla::bench {

// A folder of random token shards, removed with the object.
class RandomTokens {
 public:
  RandomTokens(std::int64_t tokens, std::int64_t vocab_size) {
    const io::TokenizerInfo tokenizer{"random", std::string(64, '0'), vocab_size};
    io::TokenShardWriter writer(folder_.path / "shard", tokenizer);
    Random random(1);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens));
    for (auto& id : ids) id = static_cast<std::int32_t>(random.below(static_cast<std::uint32_t>(vocab_size)));
    writer.append(ids);
    writer.end_document();
    const auto sha256 = writer.commit();
    io::write_token_index(folder_.path,
                          {tokenizer, {{"shard", tokens, 1, sha256}}, nlohmann::ordered_json::object(), {}});
  }

  const std::filesystem::path& path() const { return folder_.path; }

 private:
  struct Folder {
    std::filesystem::path path;

    Folder() {
      std::string name = (std::filesystem::temp_directory_path() / "efla-bench-XXXXXX").string();
      if (!mkdtemp(name.data())) throw Error("bench model", "temporary files", name, "a folder to write into");
      path = name;
    }
    ~Folder() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
  };

  Folder folder_;
};

}  // namespace efla::bench
