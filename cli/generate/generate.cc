// efla generate: text from a language model, for one prompt, a file of them, or line by line.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/generate/dialogue.h"
#include "cli/generate/prompts.h"
#include "cli/support/count_option.h"
#include "cli/support/device.h"
#include "cli/support/ignored_checkpoints.h"
#include "cli/support/interrupt.h"
#include "cli/support/model_tokenizer.h"
#include "cli/support/name_option.h"
#include "cli/support/output_file.h"
#include "cli/support/print.h"
#include "cli/support/program.h"
#include "cli/support/threads.h"
#include "cli/support/weights.h"
#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/data/tokenizers/tokenizer.h"
#include "efla/generate/generator.h"
#include "efla/generate/session.h"
#include "efla/io/json.h"
#include "efla/nn/inference/gpu_decoder.h"
#include "efla/nn/inference/inference_model.h"
#include "efla/nn/models/language_model.h"
#include "efla/nn/models/language_model_file.h"
#include "efla/torch/one_thread.h"

namespace efla::cli {
namespace {

using generate::Reply;
using generate::Session;

constexpr std::size_t kTogether = 64;  // prompts of a file that are continued at once on a GPU

struct GenerateArguments {
  std::string model, prompts, tokenizer, save, load, device = "auto", weights = "float32";
  std::optional<std::string> prompt;
  std::optional<std::uint64_t> seed;
  bool interactive = false, bos = false, json = false;
  generate::ReplyOptions reply{.max_tokens = 128};
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
  validate(arguments.reply);
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
  Generate(const GenerateArguments& arguments, const nn::LanguageModel& model, const data::Tokenizer& tokenizer,
           const generate::Generator& generator)
      : arguments_(arguments), model_(model), tokenizer_(tokenizer), generator_(generator) {
    options_ = arguments.reply;
    options_.interrupted = interrupted;
    if (arguments.json) return;
    options_.on_text = [](std::string_view text) {
      fmt::print("{}", text);
      flush_standard_output();
    };
  }

  void run() {
    Session session = arguments_.load.empty() ? Session(model_, 0) : load();
    if (arguments_.seed) session.seed = *arguments_.seed;
    if (!arguments_.prompts.empty()) {
      reply_to_each(session, read_prompts(arguments_.prompts));
    } else if (arguments_.interactive) {
      converse(session);
    } else {
      reply_to_one(session);
    }
    print_or_drop(
        stderr, fmt::format("prompt: {}; reply: {}; state: {} bytes{}\n", prefill_.text(), decode_.text(), state_bytes_,
                            model_.config().has_attention()
                                ? ", which grows with the text: softmax attention keeps keys and values"
                                : ""));
    if (!arguments_.save.empty()) {
      const auto size = generate::save_session(arguments_.save, session, model_);
      print_or_drop(stderr, fmt::format("session: {} bytes in {}\n", size, arguments_.save));
    }
    if (!arguments_.interactive && interrupted()) end_interrupted("Stopped.");
  }

 private:
  Session load() const {
    return name_option("generate", "--load-session", "session",
                       [&] { return generate::load_session(arguments_.load, model_); });
  }

  void reply_to_one(Session& session) {
    options_.to_be_continued = !arguments_.save.empty();
    options_.ends_session = arguments_.save.empty();
    watch_for_interrupts();
    if (arguments_.prompt) {
      reply(session, *arguments_.prompt, generator_.encode(session, *arguments_.prompt, arguments_.bos));
    } else {
      reply(session, "", {});
    }
  }

  // Replies to each prompt, which continues the same session with a seed of its own.
  void reply_to_each(const Session& session, const std::vector<std::string>& prompts) {
    std::vector<std::vector<std::int32_t>> ids;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      ids.push_back(generator_.encode(session, prompts[i], arguments_.bos));
      if (ids.back().empty() && session.empty()) {
        throw Error("generate", "--prompts", fmt::format("an empty prompt in line {} of {}", i + 1, arguments_.prompts),
                    "a text, or --bos");
      }
    }
    watch_for_interrupts();
    const std::size_t together = generator_.continues_together() ? kTogether : 1;
    for (std::size_t first = 0; first < prompts.size() && !interrupted(); first += together) {
      reply_to_group(session, prompts, ids, first, std::min(prompts.size(), first + together));
    }
  }

  // Replies to prompts [begin, end): to a single one piece by piece, to several at once.
  void reply_to_group(const Session& session, const std::vector<std::string>& prompts,
                      const std::vector<std::vector<std::int32_t>>& ids, std::size_t begin, std::size_t end) {
    const auto print_header = [&](std::size_t i) {
      if (!arguments_.json) fmt::print("{}==> prompt {} <==\n", i > 0 ? "\n" : "", i + 1);
    };
    std::vector<Session> sessions;
    for (std::size_t i = begin; i < end; ++i) {
      sessions.push_back(session.clone());
      sessions.back().seed += i;
    }
    if (sessions.size() == 1) {
      print_header(begin);
      options_.ends_session = true;
      return reply(sessions[0], prompts[begin], ids[begin]);
    }
    auto options = options_;
    options.on_text = {};
    generator_.replies(sessions, std::span(ids).subspan(begin, end - begin), options,
                       [&](std::size_t i, const Reply& reply) {
                         print_header(begin + i);
                         if (!arguments_.json) fmt::print("{}", reply.text);
                         report(reply, sessions[i], prompts[begin + i], ids[begin + i].size());
                       });
  }

  // Replies to lines of the user. A line continues the text on a new line; after an empty line the model continues by
  // itself.
  void converse(Session& session) {
    options_.to_be_continued = true;
    watch_for_ctrl_c();
    while (const auto line = read_line()) {
      forget_interrupt();
      const bool begun = !session.last_ids.empty();
      if (line->empty() && !begun && !arguments_.bos) continue;
      const bool new_line = !line->empty() && begun && !tokenizer_.bytes_of(session.last_ids.back()).ends_with('\n');
      if (const auto valid = utf8_prefix(*line); valid != line->size()) {
        // Drops the line and keeps the dialogue.
        cli::report(kUserMistake,
                    fmt::format("the line: got a byte at {} that is not UTF-8, expected UTF-8; it is left out", valid));
        continue;
      }
      const auto prompt = (new_line ? "\n" : "") + *line;
      reply(session, *line, generator_.encode(session, prompt, arguments_.bos));
    }
  }

  void reply(Session& session, const std::string& prompt, const std::vector<std::int32_t>& ids) {
    if (ids.empty() && session.empty()) throw Error("generate", "--prompt", "an empty text", "a text, or --bos");
    report(generator_.reply(session, ids, options_), session, prompt, ids.size());
  }

  // Prints what follows a reply's text, or all of it as JSON.
  void report(const Reply& reply, const Session& session, const std::string& prompt, std::size_t prompt_tokens) {
    const Pace prefill{prompt_tokens, reply.prefill_tokens, reply.prefill_ms};
    const Pace decode{reply.ids.size(), reply.decode_tokens, reply.decode_ms};
    if (arguments_.json) {
      fmt::print("{}\n", io::to_json_line({{"prompt", prompt},
                                           {"text", reply.text},
                                           {"tokens", reply.ids.size()},
                                           {"end", name_of(reply.end)},
                                           {"seed", session.seed},
                                           {"prefill_tokens", prefill.computed},
                                           {"prefill_tokens_per_s", prefill.per_second()},
                                           {"decode_tokens_per_s", decode.per_second()},
                                           {"drafted_tokens", reply.drafted_tokens},
                                           {"accepted_tokens", reply.accepted_tokens},
                                           {"state_bytes", session.state.bytes()}}));
    } else {
      fmt::print("\n");
    }
    flush_standard_output();
    prefill_.add(prefill);
    decode_.add(decode);
    state_bytes_ = session.state.bytes();
  }

  const GenerateArguments& arguments_;
  const nn::LanguageModel& model_;
  const data::Tokenizer& tokenizer_;
  const generate::Generator& generator_;
  generate::ReplyOptions options_;
  Pace prefill_, decode_;  // of all replies
  std::int64_t state_bytes_ = 0;
};

void run(const GenerateArguments& arguments) {
  check(arguments);
  use_threads(arguments.threads);
  libtorch::compute_on_this_thread_only();  // beside the operators, which have threads of their own
  report_ignored_checkpoints("generate", arguments.model);
  const auto model = nn::load_language_model(arguments.model, choose_device("generate", arguments.device));
  const auto path = require_tokenizer("generate", arguments.model, arguments.tokenizer);
  const auto tokenizer = data::load_tokenizer(path);
  require_tokenizer_of_run("generate", arguments.model, path, tokenizer->info());
  std::unique_ptr<nn::InferenceModel> inference;
  std::unique_ptr<nn::GpuDecoder> decoder;
  const auto weights = nn::parse_weight_type(arguments.weights);
  const bool narrow = weights != nn::WeightType::float32, cpu = model->head().is_cpu();
  if (weights == nn::WeightType::int8 && !cpu) {
    throw Error("generate", "--weights", "int8 on a GPU", "float32, bfloat16, or --device cpu");
  }
  if (cpu && (narrow || nn::InferenceModel::refusal(model->config()).empty())) {
    inference = std::make_unique<nn::InferenceModel>(*model, weights);
  }
  auto computed = model;
  if (!cpu) {
    if (narrow) {  // `model` stays as it is, because sessions have its fingerprint
      computed = nn::load_language_model(arguments.model, model->head().device());
      nn::round_weights(*computed, weights);
    }
    decoder = std::make_unique<nn::GpuDecoder>(*computed, weights, tokenizer->vocab_size());
  }
  const generate::Generator generator(*computed, *tokenizer, inference.get(), decoder.get());
  Generate(arguments, *model, *tokenizer, generator).run();
}

void add_sampling_options(CLI::App& command, GenerateArguments& arguments) {
  auto& sampling = arguments.reply.sampling;
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
  command->add_option("MODEL", arguments->model, "Folder of a model, or of a run of efla train lm")->required();
  command->add_option("--prompt", arguments->prompt, "The text to continue")->type_name("TEXT");
  command
      ->add_option("--prompts", arguments->prompts,
                   "A file of prompts: one per line, or objects with a \"prompt\" if its name ends\n"
                   "in .jsonl or .ndjson")
      ->type_name("FILE");
  command->add_flag("--interactive", arguments->interactive,
                    "Read prompts from the terminal; Ctrl-C ends a reply, Ctrl-D the program");
  command->add_option("--tokenizer", arguments->tokenizer,
                      "A SentencePiece model, a tokenizer.json, or bytes (default: what the model's folder names)");
  command->add_flag("--bos", arguments->bos, "Start the text with the bos token");
  command->add_option("--max-tokens", arguments->reply.max_tokens, "Most tokens of a reply")->capture_default_str();
  command->add_option("--stop", arguments->reply.stop, "End a reply before this text; may be given several times")
      ->type_name("TEXT")
      ->allow_extra_args(false)
      ->take_all();
  add_sampling_options(*command, *arguments);
  command->add_option("--save-session", arguments->save, "Save the session, to continue the text later, in this file")
      ->type_name("FILE");
  command->add_option("--load-session", arguments->load, "Continue the text in a file of --save-session")
      ->type_name("FILE");
  command->add_flag("--json", arguments->json, "Print one JSON object per reply");
  add_draft_option(*command, arguments->reply.draft_tokens);
  add_weights_option(*command, arguments->weights);
  add_device_option(*command, arguments->device);
  add_threads_option(*command, arguments->threads);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace efla::cli
