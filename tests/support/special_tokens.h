// A tokenizer of bytes with special tokens, for tests that have no real one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/data/tokenizers/tokenizer_json.h"
#include "tests/support/temp_folder.h"

namespace efla::test {

inline constexpr std::int32_t kTextEnd = 256, kTurnStart = 257, kTurnEnd = 258;

// Returns a tokenizer with the ids 0 to 255 for the bytes, and with the three special tokens of ChatML. The eos is
// <|endoftext|>; there is no bos.
inline std::unique_ptr<data::Tokenizer> tokenizer_with_special_tokens() {
  const TempFolder folder;
  auto document = data::tokenizer_json("bytes").tokenizer;
  auto added = nlohmann::json::array();
  for (const char* text : {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}) {
    added.push_back({{"id", kTextEnd + added.size()}, {"content", text}, {"normalized", false}, {"special", true}});
  }
  document["added_tokens"] = added;
  write_text(folder / "tokenizer_config.json", R"({"eos_token": "<|endoftext|>"})");
  return data::load_tokenizer(write_text(folder / "tokenizer.json", document.dump()));
}

// The tokenizer of bytes, with a special token in place of one byte.
class BytesWithSpecial final : public data::Tokenizer {
 public:
  BytesWithSpecial(std::int32_t id, const std::string& text)
      : Tokenizer(data::load_tokenizer("bytes")->info()), id_(id) {
    set_special_text(id, text);
  }

  std::vector<std::int32_t> encode_part(std::string_view text, bool) const override {
    const std::string& special = special_texts().at(id_);
    std::vector<std::int32_t> ids;
    while (!text.empty()) {
      const bool is_special = text.starts_with(special);
      ids.push_back(is_special ? id_ : static_cast<std::uint8_t>(text.front()));
      text.remove_prefix(is_special ? special.size() : 1);
    }
    return ids;
  }
  std::string_view bytes_of(std::int32_t id) const override { return id == id_ ? "" : bytes_->bytes_of(id); }
  bool begins_with_added_space(std::int32_t) const override { return false; }
  std::size_t last_cut(std::string_view) const override { return 0; }

 private:
  std::unique_ptr<data::Tokenizer> bytes_ = data::load_tokenizer("bytes");
  std::int32_t id_;
};

}  // namespace efla::test
