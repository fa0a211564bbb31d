// A build without XGrammar.
#include "efla/serve/grammar/grammar.h"

namespace efla::serve {

class GrammarCompiler::Implementation {};

GrammarCompiler::GrammarCompiler(const data::Tokenizer& /*tokenizer*/) {}
GrammarCompiler::~GrammarCompiler() = default;

std::string GrammarCompiler::unavailable() { return "this program was built without XGrammar"; }

void GrammarCompiler::compile(GrammarSource /*source*/, Done done) {
  done({.grammar = nullptr, .error = unavailable()});
}

}  // namespace efla::serve
