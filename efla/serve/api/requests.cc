#include "efla/serve/api/requests.h"

#include <algorithm>

#include "efla/serve/api/base64.h"
#include "efla/serve/api/defaults.h"
#include "efla/serve/api/error.h"
#include "efla/serve/api/fields.h"
#include "efla/serve/api/request_fields.h"

namespace efla::serve {
namespace {

using io::Fields;

constexpr std::int64_t kMostReplies = 128;  // n
constexpr std::size_t kMostPrompts = 2048, kMostStops = 16;

std::int32_t token_id(const nlohmann::json& value, const Fields& fields, const std::string& name) {
  if (const auto id = io::whole_number(value); id && *id >= 0 && *id <= INT32_MAX) {
    return static_cast<std::int32_t>(*id);
  }
  fields.refuse(name, "token ids, whole numbers from 0, and not " + io::brief(value));
}

std::vector<std::int32_t> token_ids(const nlohmann::json& list, const Fields& fields, const std::string& name) {
  std::vector<std::int32_t> ids;
  ids.reserve(list.size());
  for (const auto& value : list) ids.push_back(token_id(value, fields, name));
  return ids;
}

Prompt one_prompt(const nlohmann::json& value, const Fields& fields, const std::string& name) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array()) return token_ids(value, fields, name);
  fields.refuse(name, "a text, a list of token ids, or a list of these");
}

void read_prompts(const Fields& fields, GenerationRequest& request) {
  const auto* value = fields.find("prompt");
  if (value == nullptr) return;
  const bool list = value->is_array() && !value->empty() && !value->front().is_number();
  request.one_prompt = !list;
  if (!list) {
    request.prompts.push_back(one_prompt(*value, fields, "prompt"));
    return;
  }
  if (value->size() > kMostPrompts) fields.refuse("prompt", "at most " + std::to_string(kMostPrompts) + " prompts");
  for (const auto& prompt : *value) request.prompts.push_back(one_prompt(prompt, fields, "prompt"));
}

void read_stop(const Fields& fields, const std::string& name, GenerationRequest& request) {
  if (const auto* stop = fields.find(name)) {
    const auto read = [&](const nlohmann::json& text) {
      if (!text.is_string() || text.get_ref<const std::string&>().empty() || request.stop.size() == kMostStops) {
        fields.refuse(name, "a text or at most " + std::to_string(kMostStops) + " texts, none empty");
      }
      request.stop.push_back(text.get<std::string>());
    };
    if (stop->is_array()) {
      std::for_each(stop->begin(), stop->end(), read);
    } else {
      read(*stop);
    }
  }
  if (const auto* ids = fields.find("stop_token_ids")) {
    if (!ids->is_array() || ids->size() > kMostReplies) fields.refuse("stop_token_ids", "a list of token ids");
    request.stop_token_ids = token_ids(*ids, fields, "stop_token_ids");
  }
}

void read_logit_bias(const Fields& fields, engine::RequestSampling& sampling) {
  const auto* bias = fields.find("logit_bias");
  if (bias == nullptr) return;
  const std::string expected = "an object of token ids, each with a number from -100 to 100";
  if (!bias->is_object()) fields.refuse("logit_bias", expected);
  for (const auto& [name, value] : bias->items()) {
    std::size_t digits = 0;
    while (digits < name.size() && name[digits] >= '0' && name[digits] <= '9') ++digits;
    if (digits == 0 || digits != name.size() || digits > 9 || !value.is_number()) fields.refuse("logit_bias", expected);
    const auto number = value.get<double>();
    if (!(number >= -100 && number <= 100)) fields.refuse("logit_bias", expected);
    sampling.logit_bias[static_cast<std::int32_t>(std::stol(name))] = number;
  }
}

}  // namespace

void read_session_name(const Fields& fields, const char* name, std::string& into) {
  if (const auto text = fields.find<std::string>(name)) {
    check_session_name(*text, name);
    into = *text;
  }
}

void read_common(const Fields& fields, GenerationRequest& request, const std::string& stop) {
  request.model = fields.find<std::string>("model").value_or("");
  auto& sampling = request.sampling;
  sampling.temperature = fields.find<double>("temperature", 0, 100).value_or(1.0);
  sampling.top_p = fields.find<double>("top_p", 0, 1).value_or(1.0);
  sampling.top_k = std::max<std::int64_t>(0, fields.find<std::int64_t>("top_k", -1, kMost).value_or(0));
  sampling.presence_penalty = fields.find<double>("presence_penalty", -2, 2).value_or(0.0);
  sampling.frequency_penalty = fields.find<double>("frequency_penalty", -2, 2).value_or(0.0);
  sampling.repetition_penalty = fields.find<double>("repetition_penalty", 0.01, 100).value_or(1.0);
  read_logit_bias(fields, sampling);
  if (const auto seed = fields.find<std::int64_t>("seed", std::numeric_limits<std::int64_t>::min(), kMost)) {
    sampling.seed = static_cast<std::uint64_t>(*seed);
    request.seeded = true;
  }
  read_stop(fields, stop, request);
  request.stream = fields.find<bool>("stream").value_or(false);
  fields.find<std::string>("user");  // accepted, but not used
}

void read_stream_options(const Fields& fields, GenerationRequest& request) {
  if (fields.find("stream_options") == nullptr) return;
  const auto options = fields.object("stream_options");
  request.include_usage = options.find<bool>("include_usage").value_or(false);
  accept_defaults(options, Place::stream_options);
  refuse_others(options);
  if (request.include_usage && !request.stream) fields.refuse("stream_options", "only with \"stream\": true");
}

void read_state(const Fields& fields, GenerationRequest& request) {
  read_session_name(fields, "session", request.session);
  read_session_name(fields, "save_as", request.save_as);
  request.disposable = fields.find<bool>("disposable").value_or(false);
  if (request.disposable && request.save_as.empty()) fields.refuse("disposable", "only with \"save_as\"");
  request.return_state = fields.find<bool>("return_state").value_or(false);
  if (const auto text = fields.find<std::string>("state")) {
    request.state = from_base64(*text);
    if (!request.state) fields.refuse("state", "a state in base64");
    if (!request.session.empty()) fields.refuse("state", "only without \"session\"");
  }
  if (request.return_state && !request.save_as.empty()) {
    throw ApiError(400, "save_as: got a name with return_state, expected one of the two", "save_as");
  }
}

void read_n(const Fields& fields, GenerationRequest& request) {
  request.n = fields.find<std::int64_t>("n", 1, kMostReplies).value_or(1);
  const auto drawn = fields.find<std::int64_t>("best_of", 1, kMostReplies);
  if (drawn && *drawn != request.n) fields.refuse("best_of", "the value of n, because every reply is returned");
}

void require_one_reply(const GenerationRequest& request) {
  const bool keeps = !request.save_as.empty() || request.return_state;
  if (!keeps || (request.n == 1 && request.prompts.size() <= 1)) return;
  const char* field = request.n > 1 ? "n" : "prompt";
  throw ApiError(400, std::string(field) + ": got several replies with save_as or return_state, expected one", field);
}

void check_session_name(const std::string& name, const std::string& field) {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'); };
  const bool fits =
      !name.empty() && name.size() <= 100 && letter(name.front()) &&
      std::all_of(name.begin(), name.end(), [&](char c) { return letter(c) || c == '.' || c == '_' || c == '-'; });
  if (fits) return;
  throw ApiError(400,
                 field + ": got " + io::brief(name) +
                     ", expected 1 to 100 letters, digits and \"._-\" that begin with a letter or digit",
                 field);
}

GenerationRequest parse_completion(const nlohmann::json& body, std::string_view text) {
  const auto fields = fields_of(body);
  GenerationRequest request;
  read_prompts(fields, request);
  read_structured_output(fields, text, request);
  read_common(fields, request);
  read_stream_options(fields, request);
  read_state(fields, request);
  read_n(fields, request);
  request.max_tokens = fields.find<std::int64_t>("max_tokens", 0, kMost).value_or(16);
  request.logprobs = fields.find<std::int64_t>("logprobs", 0, engine::kMaxLogprobs).value_or(-1);
  request.echo = fields.find<bool>("echo").value_or(false);
  request.bos = fields.find<bool>("add_special_tokens");
  request.cache_tokens = fields.find<std::int64_t>("cache_tokens", 0, kMost).value_or(0);
  accept_defaults(fields, Place::generation);
  refuse_others(fields);
  const bool continues = !request.session.empty() || request.state.has_value();
  if (request.prompts.empty()) {
    if (!continues) fields.refuse("prompt", "a text, token ids, or a list of these");
    request.prompts.emplace_back(std::vector<std::int32_t>());
  }
  require_one_reply(request);
  return request;
}

TokenizeRequest parse_tokenize(const nlohmann::json& body) {
  const auto fields = fields_of(body);
  TokenizeRequest request;
  fields.find<std::string>("model");
  request.text = fields.get<std::string>("prompt");
  request.bos = fields.find<bool>("add_special_tokens");
  refuse_others(fields);
  return request;
}

std::vector<std::int32_t> parse_detokenize(const nlohmann::json& body) {
  const auto fields = fields_of(body);
  fields.find<std::string>("model");
  const auto* tokens = fields.find("tokens");
  if (tokens == nullptr || !tokens->is_array()) fields.refuse("tokens", "a list of token ids");
  auto ids = token_ids(*tokens, fields, "tokens");
  refuse_others(fields);
  return ids;
}

CreateSessionRequest parse_create_session(const nlohmann::json& body) {
  const auto fields = fields_of(body);
  CreateSessionRequest request;
  fields.find<std::string>("model");
  read_session_name(fields, "name", request.name);
  read_session_name(fields, "parent", request.parent);
  if (const auto* prompt = fields.find("prompt")) request.prompt = one_prompt(*prompt, fields, "prompt");
  request.bos = fields.find<bool>("add_special_tokens");
  refuse_others(fields);
  if (!request.prompt && request.parent.empty()) {
    fields.refuse("prompt", "a text or token ids, or a parent to copy");
  }
  return request;
}

std::string parse_fork(const nlohmann::json& body) {
  const auto fields = fields_of(body);
  std::string name;
  read_session_name(fields, "name", name);
  refuse_others(fields);
  return name;
}

std::int64_t parse_rewind(const nlohmann::json& body) {
  const auto fields = fields_of(body);
  const auto tokens = fields.get<std::int64_t>("tokens", 0, kMost);
  refuse_others(fields);
  return tokens;
}

}  // namespace efla::serve
