#include <algorithm>
#include <cmath>
#include <future>
#include <vector>

#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/serve/chat/json_slices.h"
#include "efla/serve/grammar/grammar.h"
#include "efla/serve/grammar/json_schema.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {
namespace {

using serve::GrammarCompiler;
using serve::GrammarSource;

constexpr std::int32_t kEnd = 257;  // of the tokenizer "bytes"

std::shared_ptr<const serve::Grammar> compiled(GrammarSource source) {
  static const auto kTokenizer = data::load_tokenizer("bytes");
  static GrammarCompiler compiler(*kTokenizer);
  std::promise<GrammarCompiler::Result> promise;
  compiler.compile(std::move(source), [&](GrammarCompiler::Result result) { promise.set_value(std::move(result)); });
  auto result = promise.get_future().get();
  require(result.grammar || !result.error.empty(), "a grammar or a reason");
  return result.grammar;
}

// Follows a grammar, with the bytes of the input as the choices. A text of a schema that ends is JSON.
void follow(const serve::Grammar& grammar, io::ByteView choices, bool schema) {
  const std::vector<std::int32_t> ends{kEnd};
  const auto state = grammar.start(ends);
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(choices.size(), 200); ++i) {
    std::vector<float> logits(kEnd + 1, 0.0F);
    state->exclude(logits);
    if (logits[kEnd] > -INFINITY && schema) {
      require(utf8_prefix(text) == text.size() && serve::is_json(text), "JSON where the text may end");
    }
    std::vector<std::int32_t> allowed;
    for (std::int32_t id = 0; id < kEnd; ++id) {
      if (logits[static_cast<std::size_t>(id)] > -INFINITY) allowed.push_back(id);
    }
    if (allowed.empty()) return;
    const auto id = allowed[static_cast<std::size_t>(choices[i]) % allowed.size()];
    require(state->take(id), "a token that the grammar allows");
    text += static_cast<char>(id);
  }
}

}  // namespace

void schemas(io::ByteView bytes) {
  if (bytes.empty()) return;
  using Kind = GrammarSource::Kind;
  const auto kind = static_cast<Kind>(bytes[0] % 3);
  const std::string text(reinterpret_cast<const char*>(bytes.data()) + 1, bytes.size() - 1);
  if (utf8_prefix(text) != text.size()) return;
  try {
    const auto prepared = kind == Kind::schema ? serve::prepared_schema(text, "schema") : text;
    require(kind != Kind::schema || serve::is_json(prepared), "a schema in JSON");
    if (!GrammarCompiler::unavailable().empty()) return;
    if (const auto grammar = compiled({.kind = kind, .text = prepared})) follow(*grammar, bytes, kind == Kind::schema);
  } catch (const Error& error) {
    require(error.argument() == "schema" && !error.expected().empty(), "an error about the schema");
  }
}

}  // namespace efla::fuzz
