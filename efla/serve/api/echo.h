// The prompt of a completion, as a reply with echo repeats it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"
#include "efla/serve/api/requests.h"

namespace efla::serve {

struct Echo {
  std::string text;                  // the prompt's own text, or the text of its ids
  std::size_t characters = 0;        // of the text
  std::vector<std::size_t> offsets;  // per id: characters of the text before its token; empty without with_offsets
};

// Returns the echo of a prompt that has these ids. added: the number of ids before the prompt's own ids, such as bos.
Echo echo_of(const data::Tokenizer& tokenizer, Prompt prompt, std::span<const std::int32_t> ids, std::size_t added,
             bool with_offsets);

}  // namespace efla::serve
