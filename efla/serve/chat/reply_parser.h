// Takes a reply apart while it is written: reasoning, content, and calls of tools.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "efla/serve/chat/message.h"
#include "efla/serve/chat/tool.h"

namespace efla::serve {

// How a model writes calls of tools.
enum class ToolFormat {
  none,  // it writes none
  xml,   // <tool_call><function=NAME><parameter=P>value</parameter></function></tool_call>, as Qwen3-Coder and Qwen3.5
  hermes,  // <tool_call>{"name": …, "arguments": {…}}</tool_call>, as Hermes and Qwen3
  json,    // {"name": …, "arguments" or "parameters": {…}} as the whole content, as Llama 3
};

// Returns the format of a name; nothing for another name.
std::optional<ToolFormat> parse_tool_format(std::string_view name);

// Returns how a model writes calls that a chat template describes.
ToolFormat tool_format_of(std::string_view chat_template);

struct ReplyFormat {
  bool reasoning = false;     // the reply may begin with <think>…</think>
  bool in_reasoning = false;  // the prompt ends with <think>
  ToolFormat calls = ToolFormat::none;
  bool one_call = false;             // further calls are left out
  std::span<const Tool> tools = {};  // must outlive the parser
  std::string id = {};               // call number i has the id id + i
};

// A piece of a reply. call: the number of the call that a name or arguments belong to.
struct ReplyDelta {
  enum class Kind { reasoning, content, call, arguments };

  Kind kind;
  std::string text;  // of a call its name
  std::size_t call = 0;
};

// Blanks around the reasoning, and around calls, are left out. What only looks like a call is content. The result does
// not depend on where the text is cut into pieces.
class ReplyParser {
 public:
  explicit ReplyParser(ReplyFormat format);

  // Takes the next piece of the text. Returns what is certain now.
  std::vector<ReplyDelta> push(std::string_view text);
  // Takes the end of the text. cut: the model would have continued. A call that is cut off has arguments that are cut
  // off, which are not JSON.
  std::vector<ReplyDelta> finish(bool cut);

  bool in_reasoning() const { return state_ == State::reasoning; }
  const std::string& reasoning() const { return reasoning_; }
  const std::string& content() const { return content_; }
  const std::vector<ToolCall>& calls() const { return calls_; }

 private:
  // What the rest of the text begins with.
  enum class State {
    start,
    reasoning,
    content,
    call,            // what follows <tool_call>
    name,            // what follows <function=
    parameters,      // in a function
    parameter_name,  // what follows <parameter=
    value,           // what follows the parameter's name
    json,            // in a call as JSON
    call_end,        // what follows a function or a call as JSON
    more_json,       // what follows a call in the format json
  };

  // Takes what is certain from the start of the rest. Returns whether the state has changed.
  bool step();
  bool start();
  bool reason();
  bool read_content();
  bool begin_call();
  bool read_name();
  bool read_parameters();
  bool read_parameter_name();
  bool read_value();
  bool read_json();
  bool end_call();
  bool read_more_json();

  // Adds a text to reasoning or content. Keeps the blanks at its end back, because a tag may follow.
  void add_text(ReplyDelta::Kind kind, std::string_view text);
  void flush_blanks(ReplyDelta::Kind kind);
  void add(ReplyDelta::Kind kind, std::string_view text);
  void add_call(const std::string& name);
  void add_arguments(std::string_view json);
  void add_value(std::string_view json);
  // Adds the calls in a text of JSON, which may be cut off. Returns whether there are only calls in the text.
  bool add_calls(std::string_view json, bool cut);
  bool knows(std::string_view name) const;
  const std::vector<std::string>& types_of_parameter() const;
  void finish_value(bool cut);

  // Makes the call so far content, because it is none.
  void give_up_call();
  void take(std::size_t bytes);  // from the start of the rest
  void skip_blanks();
  // Returns whether the rest begins with a text, and whether it may begin with the text once more text has come.
  bool begins(std::string_view text) const { return rest_.starts_with(text); }
  bool may_begin(std::string_view text) const { return rest_.size() < text.size() && text.starts_with(rest_); }
  bool change(State state);

  ReplyFormat format_;
  State state_;
  std::string rest_;              // what no function has taken yet
  std::size_t seen_ = 0;          // bytes of the rest that have been searched
  std::string call_text_;         // of the current call, in case that it is none
  std::string blanks_;            // kept back
  bool skips_blanks_;             // the next text begins after its blanks
  std::string name_, parameter_;  // of the current call
  bool first_value_ = true;       // of the current call
  bool ignored_ = false;          // the current call
  std::size_t depth_ = 0;         // of brackets in the bytes of JSON that have been searched
  bool in_string_ = false, escaped_ = false;

  std::string reasoning_, content_;
  std::vector<ToolCall> calls_;
  std::vector<ReplyDelta> deltas_;
};

}  // namespace efla::serve
