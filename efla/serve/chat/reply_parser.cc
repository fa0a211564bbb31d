#include "efla/serve/chat/reply_parser.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "efla/io/json_text.h"
#include "efla/serve/chat/json_calls.h"
#include "efla/serve/chat/json_slices.h"

namespace efla::serve {
namespace {

using Kind = ReplyDelta::Kind;

constexpr std::string_view kThink = "<think>", kThinkEnd = "</think>", kCall = "<tool_call>", kCallEnd = "</tool_call>",
                           kFunction = "<function=", kFunctionEnd = "</function>",
                           kParameter = "<parameter=", kParameterEnd = "</parameter>";

// The first tag in a text.
struct Found {
  std::size_t at = std::string_view::npos;  // or where the text ends with the beginning of a tag; npos: nowhere
  std::string_view tag = {};                // empty: only a beginning
};

Found find_tag(std::string_view text, std::initializer_list<std::string_view> tags) {
  for (auto at = text.find('<'); at != std::string_view::npos; at = text.find('<', at + 1)) {
    const auto rest = text.substr(at);
    for (const auto tag : tags) {
      if (rest.starts_with(tag)) return {at, tag};
      if (tag.starts_with(rest)) return {at};
    }
  }
  return {};
}

std::string_view trimmed(std::string_view text) {
  const auto begin = std::min(text.find_first_not_of(kBlanks), text.size());
  return text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
}

// Returns a parameter's text without the line breaks behind and before its tags.
std::string_view without_line_breaks(std::string_view text) {
  if (text.starts_with('\n')) text.remove_prefix(1);
  if (text.ends_with('\n')) text.remove_suffix(1);
  return text;
}

}  // namespace

std::optional<ToolFormat> parse_tool_format(std::string_view name) {
  if (name == "xml") return ToolFormat::xml;
  if (name == "hermes") return ToolFormat::hermes;
  return name == "json" ? std::optional(ToolFormat::json) : std::nullopt;
}

ToolFormat tool_format_of(std::string_view chat_template) {
  const auto has = [&](std::string_view text) { return chat_template.find(text) != std::string_view::npos; };
  if (has(kFunction)) return ToolFormat::xml;
  if (has(kCall)) return ToolFormat::hermes;
  return has("tools") ? ToolFormat::json : ToolFormat::none;
}

ReplyParser::ReplyParser(ReplyFormat format)
    : format_(std::move(format)),
      state_(format_.in_reasoning ? State::reasoning : State::start),
      skips_blanks_(format_.in_reasoning) {}

std::vector<ReplyDelta> ReplyParser::push(std::string_view text) {
  rest_ += text;
  while (step()) {
  }
  return std::exchange(deltas_, {});
}

std::vector<ReplyDelta> ReplyParser::finish(bool cut) {
  switch (state_) {
    case State::reasoning:
      add_text(Kind::reasoning, rest_);
      break;
    case State::call:
    case State::name:
      give_up_call();
      [[fallthrough]];
    case State::start:
    case State::content:
    case State::call_end:
    case State::more_json:
      add_text(Kind::content, rest_);
      if (calls_.empty()) flush_blanks(Kind::content);
      break;
    case State::value:
      finish_value(cut);
      [[fallthrough]];
    case State::parameters:
    case State::parameter_name:
      if (!cut) add_arguments(first_value_ ? "{}" : "}");
      break;
    case State::json:
      if (!add_calls(rest_, cut)) add_text(Kind::content, call_text_ + rest_);
      break;
  }
  rest_.clear();
  state_ = State::content;
  return std::exchange(deltas_, {});
}

bool ReplyParser::step() {
  switch (state_) {
    case State::start:
      return start();
    case State::reasoning:
      return reason();
    case State::content:
      return read_content();
    case State::call:
      return begin_call();
    case State::name:
      return read_name();
    case State::parameters:
      return read_parameters();
    case State::parameter_name:
      return read_parameter_name();
    case State::value:
      return read_value();
    case State::json:
      return read_json();
    case State::call_end:
      return end_call();
    case State::more_json:
      return read_more_json();
  }
  return false;
}

bool ReplyParser::change(State state) {
  state_ = state;
  seen_ = 0;
  return true;
}

void ReplyParser::take(std::size_t bytes) {
  rest_.erase(0, bytes);
  seen_ = 0;
}

void ReplyParser::skip_blanks() { take(std::min(rest_.find_first_not_of(kBlanks), rest_.size())); }

// Decides what the reply, or its content behind the reasoning, begins with.
bool ReplyParser::start() {
  const auto first = rest_.find_first_not_of(kBlanks, seen_);
  seen_ = std::min(first, rest_.size());
  const bool json = format_.calls == ToolFormat::json;
  if (!format_.reasoning && !json) return change(State::content);
  if (first == std::string::npos) return false;
  const auto text = std::string_view(rest_).substr(first);
  if (format_.reasoning && text.starts_with(kThink)) {
    take(first + kThink.size());
    skips_blanks_ = true;
    return change(State::reasoning);
  }
  if (format_.reasoning && kThink.starts_with(text)) return false;
  if (!json || (text.front() != '{' && text.front() != '[')) return change(State::content);
  call_text_ = rest_.substr(0, first);
  take(first);
  return change(State::json);
}

bool ReplyParser::reason() {
  const auto found = find_tag(rest_, {kThinkEnd});
  const auto size = std::min(found.at, rest_.size());
  add_text(Kind::reasoning, std::string_view(rest_).substr(0, size));
  take(size + found.tag.size());
  if (found.tag.empty()) return false;
  blanks_.clear();
  skips_blanks_ = true;
  format_.reasoning = false;  // once
  return change(State::start);
}

bool ReplyParser::read_content() {
  if (format_.calls != ToolFormat::xml && format_.calls != ToolFormat::hermes) {
    add_text(Kind::content, rest_);
    flush_blanks(Kind::content);
    take(rest_.size());
    return false;
  }
  const bool xml = format_.calls == ToolFormat::xml;
  const auto found = xml ? find_tag(rest_, {kCall, kFunction}) : find_tag(rest_, {kCall});
  const auto size = std::min(found.at, rest_.size());
  add_text(Kind::content, std::string_view(rest_).substr(0, size));
  take(size + found.tag.size());
  if (found.tag.empty()) return false;
  call_text_ = found.tag;
  return change(found.tag == kCall ? State::call : State::name);
}

bool ReplyParser::begin_call() {
  const auto blanks = std::min(rest_.find_first_not_of(kBlanks), rest_.size());
  call_text_ += rest_.substr(0, blanks);
  take(blanks);
  if (rest_.empty() || may_begin(kFunction)) return false;
  if (begins("{")) return change(State::json);
  if (!begins(kFunction)) {
    give_up_call();
    return change(State::content);
  }
  call_text_ += kFunction;
  take(kFunction.size());
  return change(State::name);
}

void ReplyParser::give_up_call() {
  flush_blanks(Kind::content);
  add_text(Kind::content, std::exchange(call_text_, {}));
}

bool ReplyParser::read_name() {
  const auto end = rest_.find_first_of(">\n<", seen_);
  seen_ = rest_.size();
  if (end == std::string::npos) return false;
  const std::string name(trimmed(std::string_view(rest_).substr(0, end)));
  if (rest_[end] != '>' || name.empty()) {
    give_up_call();
    return change(State::content);
  }
  take(end + 1);
  add_call(name);
  return change(State::parameters);
}

bool ReplyParser::read_parameters() {
  skip_blanks();
  for (const auto& [tag, next] : {std::pair(kParameter, State::parameter_name),
                                  std::pair(kFunctionEnd, State::call_end), std::pair(kCallEnd, State::call_end)}) {
    if (may_begin(tag)) return false;
    if (!begins(tag)) continue;
    if (next == State::call_end) add_arguments(first_value_ ? "{}" : "}");
    if (tag != kCallEnd) take(tag.size());
    return change(next);
  }
  take(1);  // what is no parameter
  return true;
}

bool ReplyParser::read_parameter_name() {
  const auto end = rest_.find('>', seen_);
  seen_ = rest_.size();
  if (end == std::string::npos) return false;
  parameter_ = rest_.substr(0, end);
  take(end + 1);
  return change(State::value);
}

bool ReplyParser::read_value() {
  const auto from = seen_ - std::min(seen_, kParameterEnd.size());
  const auto end = rest_.find(kParameterEnd, from);
  seen_ = rest_.size();
  if (end == std::string::npos) return false;
  add_value(coerced(without_line_breaks(std::string_view(rest_).substr(0, end)), types_of_parameter()));
  take(end + kParameterEnd.size());
  return change(State::parameters);
}

const std::vector<std::string>& ReplyParser::types_of_parameter() const {
  static const std::vector<std::string> kAny;
  const auto tool = std::ranges::find(format_.tools, name_, &Tool::name);
  if (tool == format_.tools.end()) return kAny;
  const auto found = tool->types.find(parameter_);
  return found == tool->types.end() ? kAny : found->second;
}

// Adds the value of a parameter whose end tag has not come.
void ReplyParser::finish_value(bool cut) {
  std::string_view value = rest_;
  if (!cut) {
    value = value.substr(0, std::min(value.rfind(kFunctionEnd), value.rfind(kCallEnd)));
    return add_value(coerced(without_line_breaks(value), types_of_parameter()));
  }
  const auto& types = types_of_parameter();
  if (!types.empty() && std::ranges::find(types, "string") == types.end()) return;  // the value may be another one
  for (auto size = kParameterEnd.size() - 1; size > 0; --size) {
    if (!value.ends_with(kParameterEnd.substr(0, size))) continue;
    value.remove_suffix(size);
    break;
  }
  if (value.starts_with('\n')) value.remove_prefix(1);
  auto text = io::JsonText(value).text();
  text.pop_back();  // the quotation mark
  add_value(text);
}

bool ReplyParser::read_json() {
  for (std::size_t i = seen_; i < rest_.size(); ++i) {
    const char c = rest_[i];
    if (escaped_) {
      escaped_ = false;
    } else if (in_string_) {
      escaped_ = c == '\\';
      in_string_ = c != '"';
    } else if (c == '"') {
      in_string_ = true;
    } else if (c == '{' || c == '[') {
      ++depth_;
    } else if ((c == '}' || c == ']') && --depth_ == 0) {
      const bool bare = format_.calls == ToolFormat::json;
      const auto json = std::string_view(rest_).substr(0, i + 1);
      const bool calls = is_json(json) && add_calls(json, /*cut=*/false);
      if (!calls) {
        flush_blanks(Kind::content);
        add_text(Kind::content, call_text_ + rest_.substr(0, i + 1));
      }
      take(i + 1);
      return change(!calls ? State::content : bare ? State::more_json : State::call_end);
    }
  }
  seen_ = rest_.size();
  return false;
}

bool ReplyParser::add_calls(std::string_view json, bool cut) {
  const auto calls = calls_in_json(json, cut);
  // Any object may have a name. The tags of the other formats say that the object is a call.
  const bool known = format_.calls != ToolFormat::json ||
                     std::ranges::all_of(calls, [&](const JsonCall& call) { return knows(call.name); });
  if (calls.empty() || !known) return false;
  for (const auto& call : calls) {
    add_call(call.name);
    add_arguments(call.arguments);
  }
  return true;
}

bool ReplyParser::knows(std::string_view name) const {
  return std::ranges::find(format_.tools, name, &Tool::name) != format_.tools.end();
}

bool ReplyParser::end_call() {
  skip_blanks();
  if (rest_.empty() || may_begin(kCallEnd)) return false;
  if (begins(kCallEnd)) take(kCallEnd.size());
  skips_blanks_ = true;
  return change(State::content);
}

bool ReplyParser::read_more_json() {
  take(std::min(rest_.find_first_not_of(" \t\n\r;,"), rest_.size()));
  if (rest_.empty()) return false;
  call_text_.clear();
  return change(begins("{") ? State::json : State::content);
}

void ReplyParser::add_text(Kind kind, std::string_view text) {
  if (skips_blanks_) {
    text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size()));
    skips_blanks_ = text.empty();
  }
  const auto size = text.find_last_not_of(kBlanks) + 1;
  if (size > 0) {
    flush_blanks(kind);
    add(kind, text.substr(0, size));
  }
  blanks_ += text.substr(size);
}

void ReplyParser::flush_blanks(Kind kind) { add(kind, std::exchange(blanks_, {})); }

void ReplyParser::add(Kind kind, std::string_view text) {
  if (text.empty()) return;
  (kind == Kind::reasoning ? reasoning_ : content_) += text;
  if (!deltas_.empty() && deltas_.back().kind == kind) {
    deltas_.back().text += text;
  } else {
    deltas_.push_back({kind, std::string(text)});
  }
}

void ReplyParser::add_call(const std::string& name) {
  blanks_.clear();
  call_text_.clear();
  name_ = name;
  first_value_ = true;
  ignored_ = format_.one_call && !calls_.empty();
  if (ignored_) return;
  calls_.push_back({format_.id + std::to_string(calls_.size()), name, ""});
  deltas_.push_back({Kind::call, name, calls_.size() - 1});
}

void ReplyParser::add_value(std::string_view json) {
  add_arguments((std::exchange(first_value_, false) ? "{" : ", ") + io::JsonText(parameter_).text() + ": " +
                std::string(json));
}

void ReplyParser::add_arguments(std::string_view json) {
  if (ignored_ || json.empty()) return;
  calls_.back().arguments += json;
  deltas_.push_back({Kind::arguments, std::string(json), calls_.size() - 1});
}

}  // namespace efla::serve
