#include "efla/serve/api/echo.h"

#include <utility>
#include <variant>

#include "efla/data/tokenizers/token_offsets.h"
#include "efla/serve/api/formats.h"

namespace efla::serve {

Echo echo_of(const data::Tokenizer& tokenizer, Prompt prompt, std::span<const std::int32_t> ids, std::size_t added,
             bool with_offsets) {
  Echo echo;
  if (auto* text = std::get_if<std::string>(&prompt)) {
    echo.text = std::move(*text);
    if (with_offsets) echo.offsets = data::token_offsets(tokenizer, echo.text, ids, added);
  } else {
    echo.text = tokenizer.decode(ids);
    data::StreamDecoder decoder(tokenizer);
    CharacterCount before;
    for (std::size_t i = 0; with_offsets && i < ids.size(); ++i) {
      echo.offsets.push_back(before.push(decoder.bytes_of(ids[i]), tokenizer));
      decoder.push(ids[i]);
    }
  }
  CharacterCount count;
  count.push(echo.text, tokenizer);
  echo.characters = count.characters();
  return echo;
}

}  // namespace efla::serve
