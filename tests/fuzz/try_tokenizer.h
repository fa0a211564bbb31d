// What is asked of every tokenizer that a file gives.
#pragma once

#include <algorithm>
#include <memory>
#include <string_view>

#include "efla/base/utf8.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "tests/fuzz/promises.h"

namespace efla::fuzz {

// Calls make(bytes, path); encodes, decodes and cuts a text with the tokenizer that it returns.
template <class Make>
void try_tokenizer(io::ByteView bytes, const Make& make) {
  std::unique_ptr<data::Tokenizer> tokenizer;
  if (!accepts([&] { tokenizer = make(bytes, "input"); }, bytes.size())) return;
  constexpr std::string_view kText = "a ab  abc\n\xc3\xa9 \xe6\x9d\xb1 <s> d";
  const auto ids = tokenizer->encode(kText);
  const auto in_range = [&](auto id) { return id >= 0 && id < tokenizer->vocab_size(); };
  require(!ids.empty() && std::all_of(ids.begin(), ids.end(), in_range), "ids of the vocabulary");
  const auto text = tokenizer->decode(ids);
  require(utf8_prefix(text) == text.size(), "text that is UTF-8");
  if (const auto cut = tokenizer->last_cut(kText); cut > 0) {
    auto parts = tokenizer->encode(kText.substr(0, cut));
    const auto rest = tokenizer->encode_part(kText.substr(cut), false);
    parts.insert(parts.end(), rest.begin(), rest.end());
    require(parts == ids, "the same ids where a text is cut");
  }
}

}  // namespace efla::fuzz
