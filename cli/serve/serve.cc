// efla serve: a server for a language model, with OpenAI's and Anthropic's API and a web page.
#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "cli/support/converted_types.h"
#include "cli/support/count_option.h"
#include "cli/support/device.h"
#include "cli/support/ignored_checkpoints.h"
#include "cli/support/model_tokenizer.h"
#include "cli/support/print.h"
#include "cli/support/program.h"
#include "cli/support/threads.h"
#include "cli/support/weights.h"
#include "efla/base/error.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "efla/engine/engine.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/model_size.h"
#include "efla/nn/models/language_model_file.h"
#include "efla/serve/api/service.h"
#include "efla/serve/chat/jinja_template.h"
#include "efla/serve/page/page.h"

namespace efla::cli {
namespace {

struct ServeArguments {
  std::string model, tokenizer, name, chat_template, tool_format, api_keys, state_keys, device = "auto";
  double timeout = 30, grace = 30, deadline = 0;
  serve::HttpOptions http;
  serve::ApiOptions api;
  engine::EngineOptions engine;
};

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

// Returns the name of the model for clients: the name of its folder.
std::string default_name(const std::string& model) {
  return std::filesystem::weakly_canonical(model).filename().string();
}

bool is_public(const serve::HttpOptions& http) {
  return http.unix_socket.empty() && http.host != "localhost" && http.host != "::1" && !http.host.starts_with("127.");
}

// Returns the chat template that --chat-template names: by default the one in the model's folder, if there is one.
std::shared_ptr<const serve::ChatTemplate> choose_chat_template(const std::string& name, const std::string& model,
                                                                const data::Tokenizer& tokenizer) {
  constexpr const char *kPlain = "plain", *kMissing = "python3 with jinja2 (Debian's package python3-jinja2)";
  std::vector<std::string> special;
  for (const auto& [id, text] : tokenizer.special_texts()) special.push_back(text);
  const auto folder = nn::language_model_folder(model);
  std::optional<serve::JinjaSource> source;
  if (name.ends_with(".jinja")) {
    source = serve::read_jinja_template(name, folder);
  } else if (name.empty()) {
    source = serve::find_jinja_template(folder);
  }
  if (!source) return serve::load_chat_template(name.empty() ? kPlain : name, special);
  if (auto made = serve::make_jinja_template(*source, special)) return made;
  if (!name.empty()) throw Error("serve", "--chat-template", name + " without " + kMissing, "an installed jinja2");
  print_or_drop(stderr,
                fmt::format("efla: serve: chats have the template {}, because the model's own one ({}) needs {}\n",
                            kPlain, source->file, kMissing));
  return serve::load_chat_template(kPlain, special);
}

void run(ServeArguments arguments) {
  auto& [model, tokenizer_name, name, chat_template, tool_format, api_keys, state_keys, device, timeout, grace,
         deadline, http, api, engine] = arguments;
  http.timeout = milliseconds(timeout);
  http.catch_signals = true;  // before the address is printed, because its reader may stop the server at once
  api.deadline = milliseconds(deadline);
  const serve::Keys keys(api_keys.empty() ? std::vector<std::string>()
                                          : serve::read_client_keys(api_keys, "--api-keys"));
  if (!state_keys.empty()) api.state_keys = serve::StateKeys(serve::read_keys(state_keys, "--state-keys"));
  const nn::ModelSize size = nn::model_size(model);
  api.kv_bytes_per_token = 2 * size.layers * size.width * 2;  // keys and values of 2 bytes
  api.model = name.empty() ? default_name(model) : name;
  api.page = serve::web_page();
  report_ignored_checkpoints("serve", model);
  report_converted_types("serve", model, nn::parse_weight_type(engine.weights));
  const auto tokenizer_path = require_tokenizer("serve", model, tokenizer_name);
  auto tokenizer = data::load_tokenizer(tokenizer_path);
  require_tokenizer_of_run("serve", model, tokenizer_path, tokenizer->info());
  api.chat = choose_chat_template(chat_template, model, *tokenizer);
  api.tool_format = serve::parse_tool_format(tool_format);
  engine.on_gpu = choose_model_device("serve", device, model).is_cuda();
  if (engine.on_gpu && nn::is_integer(nn::parse_weight_type(engine.weights))) {
    throw Error("serve", "--weights", engine.weights + " on a GPU", "float32, bfloat16, or --device cpu");
  }
  const auto running = engine::load_engine(model, std::move(tokenizer), engine);
  for (const auto& file : running->set_aside()) print_or_drop(stderr, "efla: serve: " + file + "\n");
  serve::Service service(*running, api, keys, http);
  fmt::print("Serving {} at {}\n", api.model, service.address());
  const auto room = running->statistics();
  const auto tokens = room.pages > 0 ? fmt::format(" with {} tokens", room.pages * room.page_tokens) : "";
  fmt::print("Memory for {} texts{} at once (--state-memory)\n", room.slots, tokens);
  flush_standard_output();
  if (keys.empty() && is_public(http)) {
    print_or_drop(stderr, "efla: serve: --host " + http.host +
                              " without --api-keys: everybody who reaches this address may use the model\n");
  }
  if (!service.run(milliseconds(grace), /*signals=*/true)) {
    end_program("serve: a request that was cancelled did not end");
  }
  running->keep_unwritten();
}

// Returns the bytes of a size such as 512MB; nothing for another text.
std::optional<std::size_t> parse_size(std::string text) {
  if (text.find('-') != std::string::npos) return std::nullopt;  // it would become a large number
  try {
    CLI::AsSizeValue(/*kb_is_1000=*/false)(text);
  } catch (const CLI::ValidationError&) {
    return std::nullopt;
  }
  errno = 0;
  const std::size_t bytes = std::strtoull(text.c_str(), nullptr, 0);
  return errno == ERANGE ? std::nullopt : std::optional(bytes);
}

void add_bytes_option(CLI::App& command, const char* option, std::size_t& bytes, const char* what, std::size_t low = 0,
                      std::size_t high = SIZE_MAX) {
  const auto convert = [low, high](std::string& text) {
    const auto size = parse_size(text);
    if (!size || *size < low || *size > high) {
      return fmt::format("got '{}', expected a number of bytes{}", text,
                         high < SIZE_MAX ? fmt::format(" from {} to {}", low, high)
                         : low > 0       ? fmt::format(" from {}, such as 512MB", low)
                                         : ", such as 512MB");
    }
    text = std::to_string(*size);
    return std::string();
  };
  command.add_option(option, bytes, what)
      ->transform(CLI::Validator(convert, ""))
      ->type_name("BYTES")
      ->capture_default_str();
}

// Returns whether a text is "*", or an origin as browsers send it: in lowercase, without a path.
bool is_origin(const std::string& text) {
  if (text == "*" || text == "null") return true;  // null: of pages in files
  const auto scheme = text.find("://");
  if (scheme == std::string::npos || scheme == 0) return false;
  const auto only = [](std::string_view part, std::string_view others) {
    return !part.empty() && std::all_of(part.begin(), part.end(), [&](char c) {
      return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || others.find(c) != std::string_view::npos;
    });
  };
  return only(text.substr(0, scheme), "+-.") && only(text.substr(scheme + 3), "-._:[]");
}

void add_address_options(CLI::App& command, ServeArguments& arguments) {
  auto& http = arguments.http;
  command.add_option("--host", http.host, "Address to listen on")->capture_default_str();
  command.add_option("--port", http.port, "Port to listen on; 0: any free one")->capture_default_str();
  command.add_option("--unix-socket", http.unix_socket, "Listen on this path instead")->type_name("FILE");
  command.add_option("--tls-certificate", http.tls_certificate, "Serve TLS with this chain of certificates (PEM)")
      ->type_name("FILE");
  command.add_option("--tls-key", http.tls_key, "The certificate's key (PEM)")->type_name("FILE");
  command
      .add_option("--api-keys", arguments.api_keys,
                  "Answer only clients with a key of this file, one per line; clients with\n"
                  "different keys do not see each other's sessions")
      ->type_name("FILE");
  command
      .add_option("--state-keys", arguments.state_keys,
                  "Sign the states that clients take with the first key of this file, one per line,\n"
                  "and refuse states that none of the keys signed")
      ->type_name("FILE");
  command.add_option("--cors", http.cors_origins, "Let pages of this origin call; may be given several times")
      ->type_name("ORIGIN")
      ->check([](const std::string& text) {
        return is_origin(text) ? std::string()
                               : fmt::format(
                                     "got '{}', expected * or an origin as browsers send it, such as "
                                     "https://a.example:8443",
                                     text);
      })
      ->allow_extra_args(false)
      ->take_all();
}

void add_model_options(CLI::App& command, ServeArguments& arguments) {
  auto& engine = arguments.engine;
  command.add_option("--tokenizer", arguments.tokenizer,
                     "A SentencePiece model, a tokenizer.json, a GGUF file, or bytes\n(default: what the model names)");
  command.add_option("--name", arguments.name, "Name of the model for clients (default: its folder's)");
  command
      .add_option("--chat-template", arguments.chat_template,
                  "plain, chatml, a Jinja template (*.jinja), or a TOML file with a text per role\n"
                  "(docs/chat.md; default: the template in the model's folder, otherwise plain)")
      ->type_name("NAME");
  command
      .add_option("--tool-format", arguments.tool_format,
                  "How the model writes calls of tools: xml, hermes or json (docs/chat.md; default:\n"
                  "as the chat template describes it)")
      ->check(CLI::IsMember({"xml", "hermes", "json"}))
      ->type_name("FORMAT");
  command.add_flag("--bos", arguments.api.bos, "Start texts with the bos token unless a request says otherwise");
  add_device_option(command, arguments.device);
  add_weights_option(command, engine.weights);
  add_kv_cache_option(command, engine.kv_cache_type);
  add_draft_options(command, engine.draft_tokens, engine.draft_head);
  command
      .add_option("--sessions", engine.sessions,
                  "Keep the sessions in this folder: each is written when it is stored, and read at the next start")
      ->type_name("FOLDER");
  add_bytes_option(command, "--state-memory", engine.state_memory, "Memory of the texts that run, such as 512MB");
  add_bytes_option(command, "--session-memory", engine.session_memory, "Memory of stored sessions");
  add_bytes_option(command, "--cache-memory", engine.cache_memory, "Memory of the cache of prefixes; 0: no cache");
  command.add_option("--swap", engine.swap, "Folder for sessions beyond --session-memory")->type_name("FOLDER");
  add_threads_option(command, engine.threads);
}

void add_limit_options(CLI::App& command, ServeArguments& arguments) {
  auto& api = arguments.api;
  auto& http = arguments.http;
  const auto seconds = [&](const char* option, double& value, const char* what, double low) {
    command.add_option(option, value, what)
        ->check([low](const std::string& text) {
          constexpr double kMost = 1e6;
          const double given = std::strtod(text.c_str(), nullptr);
          if (given >= low && given <= kMost) return std::string();
          return fmt::format("got {}, expected a number from {} to {}", text, low, kMost);
        })
        ->type_name("SECONDS")
        ->capture_default_str();
  };
  add_count_option(command, "--max-tokens", api.max_tokens, "Most tokens of a reply, and the default in chats", 1);
  add_count_option(command, "--max-prompt-tokens", api.max_prompt_tokens, "Most tokens of a prompt; 0: no limit", 0);
  add_count_option(command, "--max-queue", arguments.engine.max_queue,
                   "Requests that wait; further ones get status 429", 1);
  add_count_option(command, "--max-per-key", api.max_requests_per_key,
                   "Requests of one key that run at once; 0: no limit", 0);
  add_count_option(command, "--max-responses", arguments.engine.max_disposable,
                   "Stored states of /v1/responses, and disposable ones; beyond, the longest unused are dropped", 1);
  add_count_option(command, "--max-connections", http.max_connections, "Open connections; further ones wait", 1);
  add_bytes_option(command, "--max-body", http.max_body_bytes, "Most bytes of a request's body", 1);
  add_bytes_option(command, "--request-memory", http.request_memory,
                   "Most bytes that all requests hold together: bodies, what they become, and replies", 1);
  add_bytes_option(command, "--max-header", http.max_header_bytes, "Most bytes of a request's header", 1024, 1 << 20);
  seconds("--deadline", arguments.deadline, "Longest time of a reply; 0: no limit", 0);
  seconds("--timeout", arguments.timeout, "Longest time for a header, and for 64 KiB of a body in either direction",
          0.1);
  seconds("--grace", arguments.grace, "After SIGTERM, longest time for the replies that are running", 0);
}

}  // namespace

void add_serve(CLI::App& program) {
  auto arguments = std::make_shared<ServeArguments>();
  auto* command = program.add_subcommand(
      "serve", "Serve a language model over HTTP, with OpenAI's and Anthropic's API and a web page");
  command->add_option("MODEL", arguments->model, "Folder of a model, GGUF file, or folder of a run of efla train lm")
      ->required();
  add_address_options(*command, *arguments);
  add_model_options(*command, *arguments);
  add_limit_options(*command, *arguments);
  command->callback([arguments, command] {
    for (const char* option : {"--host", "--port"}) {
      if (command->count("--unix-socket") == 0 || command->count(option) == 0) continue;
      throw Error("serve", option, command->get_option(option)->results().front() + " with --unix-socket",
                  "one of the two");
    }
    run(*arguments);
  });
}

}  // namespace efla::cli
