#include "efla/data/tokenizers/tokenizer.h"

#include <array>
#include <filesystem>

#include <fmt/format.h>

#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/data/tokenizers/gguf_tokenizer.h"
#include "efla/data/tokenizers/json_tokenizer.h"
#include "efla/data/tokenizers/sentencepiece_tokenizer.h"
#include "efla/io/gguf/gguf.h"
#include "efla/io/sha256.h"

namespace efla::data {
namespace {

constexpr std::int32_t kBytes = 256;
constexpr const char* kBytesName = "bytes";
// Far above any model. Limits the memory that a wrong file can allocate.
constexpr std::size_t kMaxModelBytes = std::size_t{1} << 30;

class ByteTokenizer final : public Tokenizer {
 public:
  ByteTokenizer() : Tokenizer({kBytesName, io::sha256(io::as_bytes(kBytesName)), kBytes + 2, kBytes, kBytes + 1}) {
    for (std::size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<char>(i);
    set_special_text(bos(), "<|bos|>");
    set_special_text(eos(), "<|eos|>");
  }

  std::vector<std::int32_t> encode_part(std::string_view part, bool) const override {
    std::vector<std::int32_t> ids;
    ids.reserve(part.size());
    for (const char c : part) ids.push_back(static_cast<std::uint8_t>(c));
    return ids;
  }

  std::string_view bytes_of(std::int32_t id) const override {
    if (id < 0 || id >= vocab_size()) {
      throw Error("decode", "id", std::to_string(id), fmt::format("0 to {}", vocab_size() - 1));
    }
    return id < kBytes ? std::string_view(&bytes_[static_cast<std::size_t>(id)], 1) : std::string_view();
  }

  bool begins_with_added_space(std::int32_t) const override { return false; }
  std::size_t last_cut(std::string_view part) const override { return part.size(); }

 private:
  std::array<char, kBytes> bytes_{};
};

}  // namespace

std::size_t Tokenizer::replaced_size(std::string_view bytes) const { return utf8_maximal_part(bytes); }

std::string Tokenizer::decode(std::span<const std::int32_t> ids) const {
  StreamDecoder decoder(*this);
  std::string text;
  for (const auto id : ids) text += decoder.push(id);
  return text + decoder.finish();
}

std::string_view StreamDecoder::bytes_of(std::int32_t id) const {
  const auto bytes = tokenizer_.bytes_of(id);
  return !begun_ && !bytes.empty() && tokenizer_.begins_with_added_space(id) ? bytes.substr(1) : bytes;
}

std::string StreamDecoder::push(std::int32_t id) {
  held_ += bytes_of(id);
  begun_ = begun_ || !tokenizer_.bytes_of(id).empty();
  return take(false);
}

std::string StreamDecoder::finish() {
  begun_ = false;
  return take(true);
}

std::string StreamDecoder::take(bool all) {
  std::string text;
  std::string_view rest = held_;
  while (!rest.empty()) {
    const int size = utf8_character(rest);
    if (size < 0 && !all) break;
    text += size > 0 ? rest.substr(0, static_cast<std::size_t>(size)) : kReplacementCharacter;
    rest.remove_prefix(size > 0 ? static_cast<std::size_t>(size) : tokenizer_.replaced_size(rest));
  }
  held_ = std::string(rest);
  return text;
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& name) {
  if (name == kBytesName) return std::make_unique<ByteTokenizer>();
  if (!std::filesystem::exists(name)) {
    throw IoError(
        IoError::Kind::missing, name, -1,
        "cannot open it; a tokenizer is bytes, or the path of a SentencePiece model, of a tokenizer.json or of "
        "a GGUF file");
  }
  if (io::is_gguf(name)) return make_gguf_tokenizer(name);
  const auto bytes = io::read_file(name, kMaxModelBytes);
  return name.ends_with(".json") ? make_json_tokenizer(bytes, name) : make_sentencepiece_tokenizer(bytes, name);
}

void require_same_tokenizer(const io::TokenizerInfo& expected, const io::TokenizerInfo& got,
                            const std::string& operation) {
  if (expected.fingerprint == got.fingerprint) return;
  const auto describe = [](const io::TokenizerInfo& info) {
    return fmt::format("{} (sha256 {})", info.name, info.fingerprint);
  };
  throw Error(operation, "tokenizer", describe(got), describe(expected));
}

}  // namespace efla::data
