// XGrammar with the tokens of a tokenizer. A header of grammar*.cc alone.
#pragma once

#include <xgrammar/xgrammar.h>

#include <memory>

#include "efla/serve/grammar/grammar.h"

namespace efla::serve {

class XGrammar {
 public:
  explicit XGrammar(const data::Tokenizer& tokenizer);

  // Throws std::exception with the reason where the source is no grammar, or where a part of it would be ignored.
  std::shared_ptr<const Grammar> compile(const GrammarSource& source) const;

 private:
  static xgrammar::TokenizerInfo tokens_of(const data::Tokenizer& tokenizer);

  xgrammar::TokenizerInfo tokenizer_;
};

}  // namespace efla::serve
