#include "efla/serve/chat/reply_parser.h"

#include "efla/serve/chat/json_slices.h"
#include "tests/fuzz/promises.h"
#include "tests/fuzz/targets.h"

namespace efla::fuzz {
namespace {

struct Parsed {
  std::string reasoning, content, deltas;  // deltas: texts of calls and arguments
  std::vector<serve::ToolCall> calls;

  bool operator==(const Parsed&) const = default;
};

Parsed parsed(const serve::ReplyFormat& format, std::string_view text, std::size_t step, bool cut) {
  serve::ReplyParser parser(format);
  Parsed all;
  std::string reasoning, content;
  const auto take = [&](const std::vector<serve::ReplyDelta>& deltas) {
    using Kind = serve::ReplyDelta::Kind;
    for (const auto& delta : deltas) {
      if (delta.kind == Kind::call) all.deltas += '\n';
      (delta.kind == Kind::reasoning ? reasoning : delta.kind == Kind::content ? content : all.deltas) += delta.text;
    }
  };
  for (std::size_t at = 0; at < text.size(); at += step) take(parser.push(text.substr(at, step)));
  take(parser.finish(cut));
  all.reasoning = parser.reasoning();
  all.content = parser.content();
  all.calls = parser.calls();
  require(reasoning == all.reasoning && content == all.content, "pieces that make the whole");
  return all;
}

}  // namespace

void replies(io::ByteView bytes) {
  if (bytes.empty()) return;
  static const std::vector<serve::Tool> kTools{
      {"get", {{"days", {"integer"}}, {"city", {"string"}}, {"list", {"array", "null"}}, {"of", {"object"}}}}, {"now"}};
  const unsigned choice = bytes[0];
  const serve::ReplyFormat format{.reasoning = (choice & 4U) != 0,
                                  .in_reasoning = (choice & 12U) == 12U,
                                  .calls = static_cast<serve::ToolFormat>(choice & 3U),
                                  .one_call = (choice & 16U) != 0,
                                  .tools = kTools,
                                  .id = "id"};
  const bool cut = (choice & 32U) != 0;
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + 1, bytes.size() - 1);
  const auto whole = parsed(format, text, text.size() + 1, cut);
  require(whole == parsed(format, text, 1, cut), "the same reply byte by byte");
  require(whole.calls.size() <= 1 || !format.one_call, "one call");
  std::string calls;
  for (const auto& call : whole.calls) {
    calls += '\n' + call.name + call.arguments;
    require(!call.name.empty(), "a call with a name");
    // In the other formats the model writes the arguments as JSON itself.
    const bool xml = text.find('{') == std::string_view::npos && format.calls == serve::ToolFormat::xml;
    require(!xml || cut || serve::is_json_object(call.arguments), "arguments in JSON");
  }
  require(calls == whole.deltas, "pieces that make the calls");
  if (format.calls == serve::ToolFormat::none) {
    require(whole.calls.empty(), "no call");
    require(format.reasoning || whole.content == text, "the text as it is");
  }
}

}  // namespace efla::fuzz
