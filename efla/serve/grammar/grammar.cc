// Grammars by XGrammar.
#include <dlpack/dlpack.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "efla/serve/grammar/expansion.h"
#include "efla/serve/grammar/xgrammar_grammar.h"

namespace efla::serve {
namespace {

class State final : public GrammarState {
 public:
  State(const xgrammar::GrammarMatcher& matcher, std::int32_t vocab_size)
      : matcher_(matcher), vocab_size_(vocab_size), allowed_(xgrammar::GetBitmaskSize(vocab_size)) {}

  std::unique_ptr<GrammarState> clone() const override { return std::make_unique<State>(matcher_.Fork(), vocab_size_); }

  void exclude(std::span<float> logits) override {
    constexpr std::size_t kBits = 32;
    std::int64_t size = std::ssize(allowed_);
    DLTensor tensor{.data = allowed_.data(),
                    .device = {kDLCPU, 0},
                    .ndim = 1,
                    .dtype = xgrammar::GetBitmaskDLType(),
                    .shape = &size,
                    .strides = nullptr,
                    .byte_offset = 0};
    if (!matcher_.FillNextTokenBitmask(&tensor)) return;
    for (std::size_t begin = 0; begin < logits.size(); begin += kBits) {
      const auto part = logits.subspan(begin, std::min(kBits, logits.size() - begin));
      auto excluded = ~static_cast<std::uint32_t>(allowed_[begin / kBits]);
      if (excluded == UINT32_MAX) {
        std::ranges::fill(part, -INFINITY);
        continue;
      }
      if (part.size() < kBits) excluded &= (1U << part.size()) - 1;
      for (; excluded != 0; excluded &= excluded - 1)
        part[static_cast<std::size_t>(std::countr_zero(excluded))] = -INFINITY;
    }
  }

  bool take(std::int32_t id) override { return matcher_.AcceptToken(id); }
  bool take(const std::string& text) override { return matcher_.AcceptString(text); }

 private:
  xgrammar::GrammarMatcher matcher_;
  std::int32_t vocab_size_;
  std::vector<std::int32_t> allowed_;  // a bit per id
};

class Compiled final : public Grammar {
 public:
  explicit Compiled(xgrammar::CompiledGrammar grammar) : grammar_(std::move(grammar)) {}

  std::unique_ptr<GrammarState> start(std::span<const std::int32_t> ends) const override {
    const xgrammar::GrammarMatcher matcher(grammar_, std::vector<int>(ends.begin(), ends.end()));
    return std::make_unique<State>(matcher, grammar_.GetTokenizerInfo().GetVocabSize());
  }
  std::size_t bytes() const override { return grammar_.MemorySizeBytes(); }

 private:
  xgrammar::CompiledGrammar grammar_;
};

xgrammar::Grammar parsed(const GrammarSource& source, const xgrammar::TokenizerInfo& tokenizer) {
  using xgrammar::Grammar;
  switch (source.kind) {
    case GrammarSource::Kind::schema: {
      constexpr int kMostBlanks = 32;  // in a row, so that no reply consists of blanks
      return Grammar::FromJSONSchema(source.text, /*any_whitespace=*/true, std::nullopt, std::nullopt,
                                     /*strict_mode=*/false, kMostBlanks);
    }
    case GrammarSource::Kind::regex:
      return Grammar::FromRegex(source.text);
    case GrammarSource::Kind::ebnf:
      return Grammar::FromEBNF(source.text);
    case GrammarSource::Kind::tags:
      break;
  }
  auto result = Grammar::FromStructuralTag(source.text, tokenizer);
  if (const auto* error = std::get_if<xgrammar::StructuralTagError>(&result)) {
    throw std::runtime_error(std::visit([](const auto& one) { return std::string(one.what()); }, *error));
  }
  return std::get<Grammar>(std::move(result));
}

// Throws std::runtime_error for a source that would take too long to compile.
void require_small(const GrammarSource& source) {
  const bool regex = source.kind == GrammarSource::Kind::regex;
  const auto size = regex                                      ? expanded_size(source.text)
                    : source.kind == GrammarSource::Kind::ebnf ? expanded_repeats(source.text)
                                                               : 0;
  if (size <= kMostExpanded) return;
  throw std::runtime_error("got repetitions that are too long, expected at most " + std::to_string(kMostExpanded) +
                           (regex ? " characters when they are written out" : " in all"));
}

// The first warning on this thread since the last call of parse_grammar. XGrammar warns of what it leaves out.
thread_local std::string warning;

}  // namespace

XGrammar::XGrammar(const data::Tokenizer& tokenizer) : tokenizer_(tokens_of(tokenizer)) {}

xgrammar::TokenizerInfo XGrammar::tokens_of(const data::Tokenizer& tokenizer) {
  std::vector<std::string> tokens;
  tokens.reserve(static_cast<std::size_t>(tokenizer.vocab_size()));
  for (std::int64_t id = 0; id < tokenizer.vocab_size(); ++id) {
    tokens.emplace_back(tokenizer.bytes_of(static_cast<std::int32_t>(id)));  // without bytes: never allowed
  }
  std::vector<std::int32_t> ends;
  if (tokenizer.eos() >= 0) ends.push_back(tokenizer.eos());
  return {tokens, xgrammar::VocabType::RAW, static_cast<int>(tokens.size()), ends};
}

std::shared_ptr<const Grammar> XGrammar::compile(const GrammarSource& source) const {
  require_small(source);
  warning.clear();
  auto grammar = parsed(source, tokenizer_);
  if (!warning.empty()) throw std::runtime_error(std::exchange(warning, {}));
  if (source.after_blanks) {
    const auto blanks = xgrammar::Grammar::FromEBNF("root ::= [ \\n\\r\\t]{0,8}");
    grammar = xgrammar::Grammar::Concat({blanks, grammar});
  }
  xgrammar::GrammarCompiler compiler(tokenizer_, /*max_threads=*/1, /*cache_enabled=*/false);
  return std::make_shared<Compiled>(compiler.CompileGrammar(grammar));
}

}  // namespace efla::serve

// What XGrammar calls instead of printing.
namespace xgrammar {

void LogMessageImpl(const std::string& /*file*/, int /*line*/, int /*level*/, const std::string& message);
[[noreturn]] void LogFatalImpl(const std::string& /*file*/, int /*line*/, const std::string& message);

void LogMessageImpl(const std::string& /*file*/, int /*line*/, int /*level*/, const std::string& message) {
  if (efla::serve::warning.empty()) efla::serve::warning = message;
}

void LogFatalImpl(const std::string& /*file*/, int /*line*/, const std::string& message) {
  throw std::runtime_error(message);
}

}  // namespace xgrammar
