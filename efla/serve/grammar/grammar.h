// Grammars over the tokens of a tokenizer, compiled by XGrammar (Dong et al., "XGrammar: flexible and efficient
// structured generation engine for large language models", 2024, arXiv 2411.15100).
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "efla/data/tokenizers/tokenizer.h"

namespace efla::serve {

// What a text must be.
struct GrammarSource {
  enum class Kind {
    schema,  // JSON that follows a schema, as prepared_schema returns it
    regex,   // a whole match of a regular expression
    ebnf,    // what the rule `root` of a grammar describes
    tags,    // what a structural tag of XGrammar describes, in JSON
  };
  Kind kind = Kind::schema;
  std::string text = {};
  bool after_blanks = false;  // blanks may come before it

  auto operator<=>(const GrammarSource&) const = default;
};

// Where a text is in its grammar. Throws nothing but std::bad_alloc.
class GrammarState {
 public:
  virtual ~GrammarState() = default;
  virtual std::unique_ptr<GrammarState> clone() const = 0;
  // Sets the logits of the tokens that the grammar does not allow next to −infinity. Where the text may end, the ids
  // that end it are allowed.
  virtual void exclude(std::span<float> logits) = 0;
  // Advance by a token, or by a text. Return false, and do not advance, where the grammar does not allow it.
  virtual bool take(std::int32_t id) = 0;
  virtual bool take(const std::string& text) = 0;
};

// A compiled grammar. Threads may share it.
class Grammar {
 public:
  virtual ~Grammar() = default;
  // Returns the state before the first token. ends: ids that end a text.
  virtual std::unique_ptr<GrammarState> start(std::span<const std::int32_t> ends) const = 0;
  virtual std::size_t bytes() const = 0;
};

// Returns the grammar of one of these texts.
GrammarSource choice_grammar(const std::vector<std::string>& texts);

// Compiles grammars on a thread of its own, one at a time, and keeps the longest used ones.
class GrammarCompiler {
 public:
  struct Result {
    std::shared_ptr<const Grammar> grammar;  // null: none
    std::string error = {};                  // then the reason, without the name of a field
    bool is_busy = false;                    // the same request may succeed later
  };
  using Done = std::function<void(Result)>;

  // The tokenizer must outlive the object.
  explicit GrammarCompiler(const data::Tokenizer& tokenizer);
  ~GrammarCompiler();
  GrammarCompiler(const GrammarCompiler&) = delete;

  // Returns why there are no grammars: the program was built without XGrammar. "": there are.
  static std::string unavailable();

  // Calls `done` once, on this thread or the compiler's, with the grammar of a source or with an error.
  void compile(GrammarSource source, Done done);

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace efla::serve
