#include "efla/serve/api/defaults.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace efla::serve {
namespace {

using nlohmann::json;

// A field of OpenAI's API, of vLLM's or of Anthropic's.
struct Default {
  Place place;
  const char* name;
  json values;  // a list; null: any value
};

const std::vector<Default>& defaults() {
  constexpr auto kRequest = Place::generation, kMessage = Place::message, kPart = Place::content_part,
                 kStream = Place::stream_options, kAnthropic = Place::anthropic_request, kTool = Place::anthropic_tool,
                 kBlock = Place::anthropic_block, kText = Place::text;
  const auto values = [](const char* text) { return json::parse(text); };
  static const std::vector<Default> kDefaults{
      // No tools.
      {kRequest, "tools", values("[[]]")},
      {kRequest, "tool_choice", values(R"(["none", "auto"])")},
      {kRequest, "parallel_tool_calls", values("[true, false]")},
      {kRequest, "functions", values("[[]]")},
      {kRequest, "function_call", values(R"(["none", "auto"])")},
      {kMessage, "tool_calls", values("[[]]")},
      // Text of no particular form.
      {kText, "verbosity", values(R"(["medium"])")},
      {kRequest, "verbosity", values(R"(["medium"])")},
      {kRequest, "modalities", values(R"([["text"]])")},
      {kRequest, "reasoning", values("[{}]")},
      {kRequest, "suffix", values(R"([""])")},
      {kRequest, "echo", values("[false]")},
      {kRequest, "skip_special_tokens", values("[true]")},
      {kRequest, "spaces_between_special_tokens", values("[true]")},
      {kRequest, "include_stop_str_in_output", values("[false]")},
      {kRequest, "add_generation_prompt", values("[true]")},
      {kRequest, "continue_final_message", values("[false]")},
      // One reply, with tokens drawn by the fields that the server has, up to the first end.
      {kRequest, "n", values("[1]")},
      {kRequest, "min_p", values("[0]")},
      {kRequest, "typical_p", values("[1]")},
      {kRequest, "min_tokens", values("[0]")},
      {kRequest, "ignore_eos", values("[false]")},
      {kRequest, "top_logprobs", values("[0]")},
      {kRequest, "use_beam_search", values("[false]")},
      {kRequest, "length_penalty", values("[1]")},
      {kRequest, "early_stopping", values("[false]")},
      // Replies are not kept, and come at once.
      {kRequest, "store", values("[false]")},
      {kRequest, "metadata", values("[{}]")},
      {kRequest, "background", values("[false]")},
      {kRequest, "service_tier", values(R"(["auto", "default"])")},
      {kRequest, "truncation", values(R"(["disabled"])")},
      {kRequest, "include", values("[[]]")},
      {kRequest, "stream_options", values(R"([{}, {"include_obfuscation": false}])")},
      {kStream, "include_obfuscation", values("[false]")},
      {kStream, "continuous_usage_stats", values("[false]")},
      // What describes a reply.
      {kMessage, "refusal", nullptr},
      {kMessage, "annotations", nullptr},
      {kPart, "annotations", nullptr},
      {kPart, "logprobs", nullptr},
      // Anthropic's.
      {kAnthropic, "metadata", nullptr},  // says who the client's user is
      {kAnthropic, "service_tier", values(R"(["auto", "standard_only"])")},
      {kAnthropic, "speed", values(R"(["standard"])")},
      {Place::anthropic_output, "effort", values(R"(["high"])")},
      {kTool, "defer_loading", values("[false]")},
      {kTool, "allowed_callers", values(R"([["direct"]])")},
      {kTool, "eager_input_streaming", values("[true, false]")},
      {kTool, "input_examples", values("[[]]")},
      {kBlock, "citations", values("[[]]")},
      {kBlock, "caller", values(R"([{"type": "direct"}])")},
  };
  return kDefaults;
}

// Returns whether a value is `expected`, apart from fields that are null. The value may be of any size: it is not
// copied.
bool is_without_nulls(const json& value, const json& expected) {
  if (!value.is_object() || !expected.is_object()) return value == expected;
  std::size_t fields = 0;
  for (auto it = value.begin(); it != value.end(); ++it) {
    if (it->is_null()) continue;
    const auto same = expected.find(it.key());
    if (same == expected.end() || !is_without_nulls(*it, *same)) return false;
    ++fields;
  }
  return fields == expected.size();
}

}  // namespace

void accept_defaults(const io::Fields& fields, Place place) {
  for (const auto& [where, name, values] : defaults()) {
    if (where != place || fields.is_known(name)) continue;
    const auto* value = fields.find(name);
    if (value == nullptr || values.is_null()) continue;
    if (std::ranges::any_of(values, [&](const json& one) { return is_without_nulls(*value, one); })) continue;
    std::string expected;
    for (const auto& one : values) expected += (expected.empty() ? "" : " or ") + one.dump();
    fields.refuse(name, expected + ", all that is supported");
  }
}

}  // namespace efla::serve
