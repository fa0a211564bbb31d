// efla generate: text from a language model, for one prompt, a file of them, or line by line.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/generate/dialogue.h"
#include "cli/generate/prompts.h"
#include "cli/support/converted_types.h"
#include "cli/support/count_option.h"
#include "cli/support/device.h"
#include "cli/support/ignored_checkpoints.h"
#include "cli/support/interrupt.h"
#include "cli/support/model_tokenizer.h"
#include "cli/support/name_option.h"
#include "cli/support/output_file.h"
#include "cli/support/print.h"
#include "cli/support/program.h"
#include "cli/support/reply_receiver.h"
#include "cli/support/threads.h"
#include "cli/support/weights.h"
#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "efla/engine/engine.h"
#include "efla/engine/reply_text.h"
#include "efla/io/file.h"
#include "efla/io/json.h"
#include "efla/nn/inference/inference_model.h"
#include "efla/nn/inference/packed_weight.h"
#include "efla/nn/model_size.h"
#include "efla/torch/one_thread.h"

namespace efla::cli {
namespace {

constexpr std::int64_t kTogether = 64;    // prompts of a file that are continued at once
constexpr const char* kSession = "text";  // the engine's name of the text that is continued

struct GenerateArguments {
  std::string model, prompts, tokenizer, save, load, device = "auto", weights = "float32", kv_cache_type = "auto";
  std::optional<std::string> prompt;
  std::optional<std::uint64_t> seed;
  bool interactive = false, bos = false, json = false;
  engine::SamplingOptions sampling;
  std::vector<std::string> stop;
  std::int64_t max_tokens = 128, draft_tokens = engine::EngineOptions().draft_tokens, draft_head = 0;
  int threads = 0;
};

void check(const GenerateArguments& arguments) {
  const int sources = arguments.prompt.has_value() + !arguments.prompts.empty() + arguments.interactive;
  if (sources > 1 || (sources == 0 && arguments.load.empty())) {
    throw Error("generate", "--prompt",
                sources == 0 ? "none" : "more than one of --prompt, --prompts and --interactive",
                "one of --prompt, --prompts and --interactive; none only with --load-session");
  }
  if (!arguments.prompts.empty() && !arguments.save.empty()) {
    throw Error("generate", "--save-session", "a file, with --prompts", "only with one text");
  }
  if (!arguments.save.empty()) check_output_file("generate", "--save-session", arguments.save);
  validate(arguments.sampling);
  if (arguments.max_tokens < 0) {
    throw Error("generate", "max_tokens", std::to_string(arguments.max_tokens), "a count of tokens");
  }
  if (arguments.draft_tokens < 0 || arguments.draft_tokens >= nn::kMostDecoded) {
    throw Error("generate", "draft_tokens", std::to_string(arguments.draft_tokens),
                "0 to " + std::to_string(nn::kMostDecoded - 1));
  }
  engine::require_stop_strings("generate", arguments.stop);
}

// Tokens of prompts or replies, and how many tokens the model computed for them in which time: the last token is
// computed only when another one follows.
struct Pace {
  std::size_t tokens = 0;
  std::int64_t computed = 0;
  double ms = 0.0;

  void add(const Pace& other) {
    tokens += other.tokens;
    computed += other.computed;
    ms += other.ms;
  }
  double per_second() const { return computed > 0 ? 1e3 * static_cast<double>(computed) / ms : NAN; }
  std::string text() const {
    const auto rate = computed > 0 ? fmt::format(", {:.0f} tokens/s", per_second()) : "";
    return fmt::format("{} token{}{}", tokens, tokens == 1 ? "" : "s", rate);
  }
};

class Generate {
 public:
  // prompts: of the file, if one is given.
  Generate(const GenerateArguments& arguments, const std::vector<std::string>& prompts, engine::Engine& engine)
      : arguments_(arguments), prompts_(prompts), engine_(engine), info_(engine.info()), tokenizer_(*info_.tokenizer) {}

  void run() {
    if (!arguments_.load.empty()) load();
    if (arguments_.seed) seed_ = *arguments_.seed;
    if (!arguments_.prompts.empty()) {
      reply_to_each(prompts_);
    } else if (arguments_.interactive) {
      converse();
    } else {
      reply_to_one();
    }
    print_or_drop(
        stderr,
        fmt::format(
            "prompt: {}; reply: {}; state: {} bytes{}\n", prefill_.text(), decode_.text(), state_bytes_,
            info_.token_bytes > 0 ? ", which grows with the text: softmax attention keeps keys and values" : ""));
    if (!arguments_.save.empty()) save();
    if (!error_.empty()) throw std::runtime_error(error_);
    if (!arguments_.interactive && interrupted()) end_interrupted("Stopped.");
  }

 private:
  // A reply that the engine makes.
  struct Running {
    engine::RequestId id;
    std::shared_ptr<ReplyReceiver> receiver;
    std::uint64_t seed;
    std::string prompt;
    std::size_t prompt_tokens;
  };

  void load() {
    const auto bytes = io::read_file(arguments_.load);
    try {
      name_option("generate", "--load-session", "session", [&] {
        engine_.load(kSession, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
      });
    } catch (const Error& error) {  // names the file instead of the session
      const std::string own = std::string("session ") + kSession, got = error.got();
      if (!got.starts_with(own)) throw;
      throw Error(error.operation(), error.argument(), arguments_.load + got.substr(own.size()), error.expected());
    } catch (const IoError& error) {
      throw IoError(error.kind(), arguments_.load, -1, std::string(error.what()).substr(error.path().size() + 2));
    }
    know_session();
    seed_ = session_->seed;
  }

  // Asks the engine for what the next reply needs to know of the text.
  void know_session() { session_ = engine_.session(kSession); }

  void save() const {
    if (!session_) return;  // no reply has come to its end
    const std::string bytes = engine_.save(kSession);
    io::write_file_atomically(arguments_.save, bytes);
    print_or_drop(stderr, fmt::format("session: {} bytes in {}\n", bytes.size(), arguments_.save));
  }

  // Returns the ids of a prompt, with the id that starts a text before them if the text is empty and --bos is given.
  std::vector<std::int32_t> encode(std::string_view prompt) const {
    if (const auto valid = utf8_prefix(prompt); valid != prompt.size()) {
      throw Error("generate", "prompt", "a byte at " + std::to_string(valid) + " that is not UTF-8", "UTF-8");
    }
    auto ids = tokenizer_.encode(prompt);
    if (!arguments_.bos || session_) return ids;
    if (info_.bos < 0 || info_.bos >= tokenizer_.vocab_size()) {
      throw Error("generate", "bos", "a tokenizer without a token that begins a text", "one that has it");
    }
    ids.insert(ids.begin(), info_.bos);
    return ids;
  }

  // Lets the engine reply to a prompt, with the seed of number `index`.
  Running submit(const std::string& prompt, std::vector<std::int32_t> ids, std::uint64_t index, bool goes_on) const {
    Running running{0, std::make_shared<ReplyReceiver>(), seed_ + index, prompt, ids.size()};
    engine::Request request;
    request.prompt = std::move(ids);
    if (session_) request.session = kSession;
    if (goes_on) request.save_as = kSession;
    request.to_be_continued = goes_on;
    request.max_tokens = arguments_.max_tokens;
    static_cast<engine::SamplingOptions&>(request.sampling) = arguments_.sampling;
    request.sampling.seed = running.seed;
    request.sampling.draws = session_ ? session_->draws : 0;
    request.stop = arguments_.stop;
    running.id = engine_.submit(std::move(request), running.receiver);
    return running;
  }

  // Prints the text of a reply as it comes, after a header, which a reply that never begins does not get. Interrupts
  // `all` when the user wants it.
  void follow(const Running& running, const std::vector<Running>& all, std::string header = {}) {
    constexpr std::chrono::milliseconds kPause{50};
    const auto print_header = [&] { fmt::print("{}", std::exchange(header, {})); };
    while (running.receiver->end() == nullptr) {
      const std::string text = running.receiver->wait(kPause);
      if (!arguments_.json && !text.empty()) {
        print_header();
        fmt::print("{}", text);
        flush_standard_output();
      }
      if (interrupted() && !std::exchange(asked_, true)) {
        for (const auto& other : all) engine_.interrupt(other.id);
      }
    }
    const auto& end = *running.receiver->end();
    if (end.reason == engine::FinishReason::cancelled && all.size() > 1) return;
    print_header();
    if (end.reason == engine::FinishReason::error) {
      if (error_.empty()) error_ = end.error;
    } else {
      report(running, end);
    }
  }

  void reply(const std::string& prompt, const std::vector<std::int32_t>& ids, bool goes_on) {
    if (ids.empty() && !session_) throw Error("generate", "--prompt", "an empty text", "a text, or --bos");
    asked_ = false;
    const std::vector running{submit(prompt, ids, 0, goes_on)};
    follow(running.front(), running);
    if (goes_on && is_whole(running.front().receiver->end()->reason)) know_session();
  }

  void reply_to_one() {
    watch_for_interrupts();
    const bool goes_on = !arguments_.save.empty();
    if (arguments_.prompt) {
      reply(*arguments_.prompt, encode(*arguments_.prompt), goes_on);
    } else {
      reply("", {}, goes_on);
    }
  }

  // Replies to each prompt, which continues the same text with a seed of its own.
  void reply_to_each(const std::vector<std::string>& prompts) {
    std::vector<std::vector<std::int32_t>> ids;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      ids.push_back(encode(prompts[i]));
      if (ids.back().empty() && !session_) {
        throw Error("generate", "--prompts", fmt::format("an empty prompt in line {} of {}", i + 1, arguments_.prompts),
                    "a text, or --bos");
      }
    }
    watch_for_interrupts();
    std::vector<Running> all;
    for (std::size_t i = 0; i < prompts.size(); ++i) all.push_back(submit(prompts[i], std::move(ids[i]), i, false));
    for (std::size_t i = 0; i < all.size(); ++i) {
      follow(all[i], all, arguments_.json ? "" : fmt::format("{}==> prompt {} <==\n", i > 0 ? "\n" : "", i + 1));
    }
  }

  // Replies to lines of the user. A line continues the text on a new line; after an empty line the model continues by
  // itself.
  void converse() {
    watch_for_ctrl_c();
    while (const auto line = error_.empty() ? read_line() : std::nullopt) {
      forget_interrupt();
      const bool begun = session_ && session_->last_id >= 0;
      if (line->empty() && !begun && !arguments_.bos) continue;
      const bool new_line = !line->empty() && begun && !tokenizer_.bytes_of(session_->last_id).ends_with('\n');
      if (const auto valid = utf8_prefix(*line); valid != line->size()) {
        // Drops the line and keeps the dialogue.
        cli::report(kUserMistake,
                    fmt::format("the line: got a byte at {} that is not UTF-8, expected UTF-8; it is left out", valid));
        continue;
      }
      reply(*line, encode((new_line ? "\n" : "") + *line), /*goes_on=*/true);
    }
  }

  // Returns how a reply ended.
  const char* name_of_end(const engine::Finish& end) const {
    if (end.reason == engine::FinishReason::length) return "max_tokens";
    if (end.reason != engine::FinishReason::stop) return "interrupted";
    return std::ranges::find(info_.ends, end.stop_id) != info_.ends.end() ? "end_of_text" : "stop_string";
  }

  // Prints what follows a reply's text, or all of it as JSON.
  void report(const Running& running, const engine::Finish& end) {
    const auto& usage = end.usage;
    const double begun = end.first_token_ms > 0 ? end.first_token_ms : end.total_ms;
    const Pace prefill{running.prompt_tokens, usage.prefilled_tokens, begun - end.queue_ms};
    const Pace decode{static_cast<std::size_t>(usage.completion_tokens), usage.decoded_tokens, end.total_ms - begun};
    if (arguments_.json) {
      fmt::print("{}\n", io::to_json_line({{"prompt", running.prompt},
                                           {"text", running.receiver->text()},
                                           {"tokens", usage.completion_tokens},
                                           {"end", name_of_end(end)},
                                           {"seed", running.seed},
                                           {"prefill_tokens", prefill.computed},
                                           {"prefill_tokens_per_s", prefill.per_second()},
                                           {"decode_tokens_per_s", decode.per_second()},
                                           {"drafted_tokens", usage.drafted_tokens},
                                           {"accepted_tokens", usage.accepted_tokens},
                                           {"state_bytes", end.state_bytes}}));
    } else {
      fmt::print("\n");
    }
    flush_standard_output();
    prefill_.add(prefill);
    decode_.add(decode);
    state_bytes_ = end.state_bytes;
  }

  const GenerateArguments& arguments_;
  const std::vector<std::string>& prompts_;
  engine::Engine& engine_;
  const engine::EngineInfo info_;
  const data::Tokenizer& tokenizer_;
  std::optional<engine::SessionInfo> session_;  // the text that is continued; none: an empty text
  std::uint64_t seed_ = 0;
  bool asked_ = false;     // to interrupt the replies
  std::string error_;      // of the first reply that failed
  Pace prefill_, decode_;  // of all replies
  std::size_t state_bytes_ = 0;
};

void run(const GenerateArguments& arguments) {
  check(arguments);
  use_threads(arguments.threads);
  nn::model_size(arguments.model);  // the mistakes of whose configuration come first
  report_ignored_checkpoints("generate", arguments.model);
  report_converted_types("generate", arguments.model, nn::parse_weight_type(arguments.weights));
  const auto path = require_tokenizer("generate", arguments.model, arguments.tokenizer);
  auto tokenizer = data::load_tokenizer(path);
  require_tokenizer_of_run("generate", arguments.model, path, tokenizer->info());
  engine::EngineOptions options;
  options.on_gpu = choose_model_device("generate", arguments.device, arguments.model).is_cuda();
  options.weights = arguments.weights;
  options.kv_cache_type = arguments.kv_cache_type;
  if (options.on_gpu && nn::is_integer(nn::parse_weight_type(options.weights))) {
    throw Error("generate", "--weights", options.weights + " on a GPU", "float32, bfloat16, or --device cpu");
  }
  options.keep_sessions = !arguments.save.empty() || !arguments.load.empty();
  options.state_memory = options.session_memory = engine::kNoBound;
  options.cache_memory = 0;
  const auto prompts = arguments.prompts.empty() ? std::vector<std::string>() : read_prompts(arguments.prompts);
  options.max_texts = std::clamp<std::int64_t>(std::ssize(prompts), 1, kTogether);
  options.draft_tokens = arguments.draft_tokens;
  options.draft_head = arguments.draft_head;
  options.step_time = std::chrono::seconds(1);  // between two looks at an interrupt
  options.max_queue = std::numeric_limits<std::int64_t>::max();
  options.threads = arguments.threads;
  const auto engine = engine::load_engine(arguments.model, std::move(tokenizer), options);
  Generate(arguments, prompts, *engine).run();
}

void add_sampling_options(CLI::App& command, GenerateArguments& arguments) {
  auto& sampling = arguments.sampling;
  command
      .add_option("--temperature", sampling.temperature,
                  "Divide the logits by this; 0: always take the most probable token")
      ->capture_default_str();
  command.add_option("--top-k", sampling.top_k, "Draw from the k most probable tokens; 0: from all")
      ->capture_default_str();
  command
      .add_option("--top-p", sampling.top_p,
                  "Draw from the fewest tokens whose probabilities sum to p; 0: the most probable token")
      ->capture_default_str();
  command
      .add_option("--repetition-penalty", sampling.repetition_penalty,
                  "Above 1: tokens that occurred in the text become less probable")
      ->capture_default_str();
  command
      .add_option("--seed", arguments.seed,
                  "Seed of the draws (default: 0, or the session's); the prompts of a file\n"
                  "have this seed, the next, and so on")
      ->check(seed_range());
}

}  // namespace

void add_generate(CLI::App& program) {
  auto arguments = std::make_shared<GenerateArguments>();
  auto* command = program.add_subcommand("generate", "Continue texts with a language model");
  command->add_option("MODEL", arguments->model, "Folder of a model, GGUF file, or folder of a run of efla train lm")
      ->required();
  command->add_option("--prompt", arguments->prompt, "The text to continue")->type_name("TEXT");
  command
      ->add_option("--prompts", arguments->prompts,
                   "A file of prompts: one per line, or objects with a \"prompt\" if its name ends\n"
                   "in .jsonl or .ndjson")
      ->type_name("FILE");
  command->add_flag("--interactive", arguments->interactive,
                    "Read prompts from the terminal; Ctrl-C ends a reply, Ctrl-D the program");
  command->add_option(
      "--tokenizer", arguments->tokenizer,
      "A SentencePiece model, a tokenizer.json, a GGUF file, or bytes\n(default: what the model names)");
  command->add_flag("--bos", arguments->bos, "Start the text with the bos token");
  command->add_option("--max-tokens", arguments->max_tokens, "Most tokens of a reply")->capture_default_str();
  command->add_option("--stop", arguments->stop, "End a reply before this text; may be given several times")
      ->type_name("TEXT")
      ->allow_extra_args(false)
      ->take_all();
  add_sampling_options(*command, *arguments);
  command->add_option("--save-session", arguments->save, "Save the session, to continue the text later, in this file")
      ->type_name("FILE");
  command->add_option("--load-session", arguments->load, "Continue the text in a file of --save-session")
      ->type_name("FILE");
  command->add_flag("--json", arguments->json, "Print one JSON object per reply");
  add_draft_options(*command, arguments->draft_tokens, arguments->draft_head);
  add_weights_option(*command, arguments->weights);
  add_kv_cache_option(*command, arguments->kv_cache_type);
  add_device_option(*command, arguments->device);
  add_threads_option(*command, arguments->threads);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace efla::cli
