// Grammars of replies that call tools.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "efla/serve/chat/reply_parser.h"
#include "efla/serve/chat/tool.h"
#include "efla/serve/grammar/grammar.h"

namespace efla::serve {

// Which calls a reply may have.
struct ToolChoice {
  bool must_call = false;  // the reply is a call, or several
  std::string name = {};   // of the only tool that it may call; empty: of any
  bool one_call = false;
};

// Returns the grammar of replies whose calls of tools can be read in a format, with arguments that follow the schemas
// of the tools (Tool::schema, where it is known). content: what a reply without calls follows; nothing: any text.
// arguments: the name that a call in JSON has for its arguments. Throws Error about "tools" for a schema that has no
// form in XML.
GrammarSource tool_grammar(std::span<const Tool> tools, ToolFormat format, const ToolChoice& choice,
                           const std::optional<GrammarSource>& content, std::string_view arguments);

}  // namespace efla::serve
