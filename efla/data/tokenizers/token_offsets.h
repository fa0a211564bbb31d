// Finds where the tokens of a text begin in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"

namespace efla::data {

// Returns for each id the number of characters of the text that begin before its token. A token that continues a
// character counts this character as begun. ids: what encode has made of the text, after `added` ids that the text does
// not have, such as bos.
//
// The tokens' own texts can differ from the text: encode adds spaces and changes characters to their normal form, and
// an unknown token stands for any characters. Normal forms are aligned by the characters of their full decomposition
// (NFKD), which changes of form leave as they are. An unknown token is as long as the text up to the next known one.
std::vector<std::size_t> token_offsets(const Tokenizer& tokenizer, std::string_view text,
                                       std::span<const std::int32_t> ids, std::size_t added);

}  // namespace efla::data
