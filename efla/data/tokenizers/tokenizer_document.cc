#include "efla/data/tokenizers/tokenizer_document.h"

#include <utility>

namespace efla::data {

using nlohmann::json;

json added_token_json(const AddedToken& token) {
  return {{"id", token.id},  {"content", token.text},          {"single_word", false},    {"lstrip", false},
          {"rstrip", false}, {"normalized", token.normalized}, {"special", token.special}};
}

json tokenizer_document(json added, json normalizer, json pre_tokenizer, json decoder, json model) {
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", std::move(added)},
          {"normalizer", std::move(normalizer)},
          {"pre_tokenizer", std::move(pre_tokenizer)},
          {"post_processor", nullptr},
          {"decoder", std::move(decoder)},
          {"model", std::move(model)}};
}

json bpe_model(json vocabulary, json merges, json unknown, bool byte_fallback) {
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", std::move(unknown)},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", true},
          {"byte_fallback", byte_fallback},
          {"ignore_merges", false},
          {"vocab", std::move(vocabulary)},
          {"merges", std::move(merges)}};
}

}  // namespace efla::data
