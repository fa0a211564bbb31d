#include "efla/data/tokenizers/tokenizer_json.h"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "efla/base/utf8.h"
#include "efla/data/tokenizers/byte_level_tokenizer.h"
#include "efla/data/tokenizers/gguf_tokenizer.h"
#include "efla/data/tokenizers/pieces.h"
#include "efla/data/tokenizers/sentencepiece_model.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "efla/data/tokenizers/tokenizer_document.h"
#include "efla/io/file.h"
#include "efla/io/gguf/gguf.h"

namespace efla::data {
namespace {

using nlohmann::json;
using Kind = SentencePieceModel::Kind;

json configuration(const std::string& bos, const std::string& eos) {
  return {{"tokenizer_class", "PreTrainedTokenizerFast"},
          {"bos_token", bos},
          {"eos_token", eos},
          {"clean_up_tokenization_spaces", false}};
}

TokenizerJson of_bytes() {
  const auto bytes = load_tokenizer("bytes");
  const auto& bos = bytes->special_texts().at(bytes->bos());
  const auto& eos = bytes->special_texts().at(bytes->eos());
  json vocabulary = json::object();
  for (const auto& character : characters_of_bytes()) vocabulary.emplace(character, vocabulary.size());
  json added = json::array(
      {added_token_json({bytes->bos(), bos, true, false}), added_token_json({bytes->eos(), eos, true, false})});
  json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  return {tokenizer_document(std::move(added), nullptr, byte_level, byte_level,
                             bpe_model(std::move(vocabulary), json::array(), nullptr, false)),
          configuration(bos, eos)};
}

// Returns the pairs of pieces that form a piece, by falling score of the piece: the order in which BPE joins them.
json merges_of(const SentencePieceModel& model) {
  std::unordered_map<std::string_view, std::size_t> ids;
  for (std::size_t i = 0; i < model.pieces.size(); ++i) {
    if (model.pieces[i].kind == Kind::normal) ids.emplace(model.pieces[i].text, i);
  }
  std::vector<std::size_t> order;
  for (const auto& [text, id] : ids) order.push_back(id);
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    const float left = model.pieces[a].score, right = model.pieces[b].score;
    return left > right || (left == right && a < b);
  });
  json merges = json::array();
  for (const auto id : order) {
    const std::string_view text = model.pieces[id].text;
    for (std::size_t at = 0; at < text.size();) {
      at += static_cast<std::size_t>(utf8_character(text.substr(at)));
      const auto left = text.substr(0, at), right = text.substr(at);
      if (ids.contains(left) && ids.contains(right)) merges.push_back(json::array({left, right}));
    }
  }
  return merges;
}

TokenizerJson of_sentencepiece(const std::string& path) {
  const auto tokenizer = load_tokenizer(path);  // refuses what is not supported
  return tokenizer_json(parse_sentencepiece_model(io::read_file(path), path), read_tokenizer_config(path));
}

}  // namespace

TokenizerJson tokenizer_json(const SentencePieceModel& model, const TokenizerConfig& beside) {
  json vocabulary = json::object(), added = json::array(), unknown;
  std::vector<AddedToken> own;
  for (std::size_t i = 0; i < model.pieces.size(); ++i) {
    const auto& piece = model.pieces[i];
    vocabulary[piece.text] = i;
    if (piece.kind == Kind::unknown) unknown = piece.text;
    if (piece.kind == Kind::unknown || piece.kind == Kind::control) {
      own.push_back({-1, piece.text, true, false});
    }
  }
  auto all = own;
  all.insert(all.end(), beside.added.begin(), beside.added.end());
  for (const auto& token : number_added_tokens(all, vocabulary)) added.push_back(added_token_json(token));
  const json space = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", kSpaceMark}};
  const json no_space = {{"type", "Replace"}, {"pattern", {{"String", kSpaceMark}}}, {"content", " "}};
  json normalizers = json::array(), pre_tokenizer,
       decoders = json::array({no_space, {{"type", "ByteFallback"}}, {{"type", "Fuse"}}});
  if (model.add_dummy_prefix) {
    normalizers.push_back({{"type", "Prepend"}, {"prepend", kSpaceMark}});
    decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  }
  normalizers.push_back(space);
  json normalizer{{"type", "Sequence"}, {"normalizers", std::move(normalizers)}};
  if (added.size() > own.size()) {  // as transformers converts a model with added tokens
    normalizer = nullptr;
    pre_tokenizer = {{"type", "Metaspace"}, {"replacement", kSpaceMark}, {"split", false}};
    pre_tokenizer["prepend_scheme"] = !model.add_dummy_prefix ? "never" : beside.legacy ? "always" : "first";
  }
  const auto name = [&](const char* field, const std::string& piece) {
    const auto text = beside.text_of(field);
    return text.empty() ? piece : std::string(text);
  };
  auto config = configuration(name("bos_token", model.bos_piece), name("eos_token", model.eos_piece));
  config["unk_token"] = unknown;
  return {tokenizer_document(std::move(added), std::move(normalizer), std::move(pre_tokenizer),
                             {{"type", "Sequence"}, {"decoders", std::move(decoders)}},
                             bpe_model(std::move(vocabulary), merges_of(model), unknown, model.byte_fallback)),
          std::move(config)};
}

TokenizerJson tokenizer_json(const std::string& name) {
  if (io::is_gguf(name)) return {gguf_tokenizer_document(name), gguf_tokenizer_config(name)};
  return name == "bytes" ? of_bytes() : of_sentencepiece(name);
}

}  // namespace efla::data
