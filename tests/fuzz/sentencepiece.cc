#include "efla/data/tokenizers/sentencepiece_tokenizer.h"
#include "tests/fuzz/targets.h"
#include "tests/fuzz/try_tokenizer.h"

namespace efla::fuzz {

void sentencepiece(io::ByteView bytes) { try_tokenizer(bytes, data::make_sentencepiece_tokenizer); }

}  // namespace efla::fuzz
