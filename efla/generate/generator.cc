#include "efla/generate/generator.h"

#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/generate/stop_strings.h"

namespace efla::generate {
namespace {

using Clock = std::chrono::steady_clock;

// Tokens of a prompt between two calls of `interrupted`. The model cuts them further.
constexpr std::size_t kPrefillPiece = 16384;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Prefills the first `count` pending ids. Returns the logits [vocab_size] after them.
torch::Tensor take_in(const nn::LanguageModel& model, Session& session, std::size_t count) {
  const auto begin = session.pending.begin();
  const auto ids = torch::tensor(at::IntArrayRef(session.pending.data(), count), torch::kLong);
  auto logits = count == 1 ? model.step(ids, session.state) : model.prefill(ids.unsqueeze(0), session.state);
  session.pending.erase(begin, begin + static_cast<std::ptrdiff_t>(count));
  return logits.squeeze(0).to(torch::kCPU).contiguous();
}

// Keeps the last three ids that stand for bytes, because they hold every byte of an unfinished character.
void remember(std::vector<std::int32_t>& last_ids, const data::Tokenizer& tokenizer, std::int32_t id) {
  if (tokenizer.bytes_of(id).empty()) return;
  last_ids.push_back(id);
  if (last_ids.size() > kLastIds) last_ids.erase(last_ids.begin());
}

// Converts ids to text, up to a stop string.
class Writer {
 public:
  Writer(const data::Tokenizer& tokenizer, const Session& session, const ReplyOptions& options, std::string& text)
      : decoder_(tokenizer), stop_(options.stop, session.held), on_text_(options.on_text), text_(text) {
    for (const auto id : session.last_ids) decoder_.push(id);  // restores the unfinished character
  }

  // Returns false once a stop string is there.
  bool push(std::int32_t id) { return pass_on(stop_.push(decoder_.push(id))); }
  void finish() {
    if (pass_on(stop_.push(decoder_.finish()))) pass_on(stop_.finish());
  }
  const std::string& held() const { return stop_.held(); }

 private:
  bool pass_on(const std::string& piece) {
    text_ += piece;
    if (on_text_ && !piece.empty()) on_text_(piece);
    return !stop_.stopped();
  }

  data::StreamDecoder decoder_;
  StopStrings stop_;
  const std::function<void(std::string_view)>& on_text_;
  std::string& text_;
};

}  // namespace

std::int64_t next_id(const nn::LanguageModel& model, Session& session, const SamplingOptions& options,
                     std::int64_t limit) {
  if (session.pending.empty()) {
    throw Error("generate", "--prompt", "an empty text and a tokenizer without an id that begins one", "a prompt");
  }
  const auto logits = take_in(model, session, session.pending.size());
  Random random(session.seed, session.draws++);
  const auto id = sample({logits.data_ptr<float>(), static_cast<std::size_t>(limit)}, session.seen, options, random);
  session.seen.add(id);
  session.pending = {id};
  return id;
}

std::string_view name_of(ReplyEnd end) {
  switch (end) {
    case ReplyEnd::max_tokens:
      return "max_tokens";
    case ReplyEnd::end_of_text:
      return "end_of_text";
    case ReplyEnd::stop_string:
      return "stop_string";
    case ReplyEnd::interrupted:
      return "interrupted";
  }
  return "";
}

void validate(const ReplyOptions& options) {
  validate(options.sampling);
  if (options.max_tokens < 0) {
    throw Error("generate", "--max-tokens", std::to_string(options.max_tokens), "a count of tokens");
  }
  for (const auto& string : options.stop) {
    if (string.empty() || utf8_prefix(string) != string.size()) {
      throw Error("generate", "--stop", string.empty() ? "an empty text" : "a text that is not UTF-8",
                  "UTF-8 that ends the reply");
    }
  }
}

Generator::Generator(const nn::LanguageModel& model, const data::Tokenizer& tokenizer)
    : model_(model),
      tokenizer_(tokenizer),
      bos_(tokenizer.bos() >= 0 ? tokenizer.bos() : model.config().bos_token_id.value_or(-1)),
      eos_(tokenizer.eos() >= 0 ? tokenizer.eos() : model.config().eos_token_id.value_or(-1)) {
  if (tokenizer.vocab_size() > model.config().vocab_size) {
    throw Error("generate", "--tokenizer",
                tokenizer.info().name + " of " + std::to_string(tokenizer.vocab_size()) + " tokens",
                "at most the " + std::to_string(model.config().vocab_size) + " of the model's vocabulary");
  }
}

std::vector<std::int32_t> Generator::encode(const Session& session, std::string_view prompt, bool bos) const {
  if (const auto valid = utf8_prefix(prompt); valid != prompt.size()) {
    throw Error("generate", "--prompt", "a byte at " + std::to_string(valid) + " that is not UTF-8", "UTF-8");
  }
  auto ids = tokenizer_.encode(prompt);
  if (!bos || !session.empty()) return ids;
  if (bos_ < 0 || bos_ >= tokenizer_.vocab_size()) {
    throw Error("generate", "--bos", "a tokenizer without a token that begins a text", "one that has it");
  }
  ids.insert(ids.begin(), static_cast<std::int32_t>(bos_));
  return ids;
}

// Prefills all but the last piece of a prompt, so that it can be interrupted; all but the last id if nothing is drawn.
void Generator::prefill(Session& session, const ReplyOptions& options, Reply& reply) const {
  const std::size_t left = options.max_tokens == 0 ? 1 : kPrefillPiece;
  while (session.pending.size() > left && reply.end != ReplyEnd::interrupted) {
    const auto count = std::min(kPrefillPiece, session.pending.size() - 1);
    const auto start = Clock::now();
    take_in(model_, session, count);
    reply.prefill_ms += ms_since(start);
    reply.prefill_tokens += static_cast<std::int64_t>(count);
    if (options.interrupted && options.interrupted()) reply.end = ReplyEnd::interrupted;
  }
}

Reply Generator::reply(Session& session, std::span<const std::int32_t> prompt, const ReplyOptions& options) const {
  validate(options);
  for (const auto id : prompt) {
    session.seen.add(id);
    remember(session.last_ids, tokenizer_, id);
  }
  session.pending.insert(session.pending.end(), prompt.begin(), prompt.end());
  if (!prompt.empty()) session.held.clear();

  Reply reply;
  Writer writer(tokenizer_, session, options, reply.text);
  prefill(session, options, reply);
  bool of_prompt = !prompt.empty() || session.pending.size() > 1;  // whether pending ids are of the prompt
  while (reply.end == ReplyEnd::max_tokens && std::cmp_less(reply.ids.size(), options.max_tokens)) {
    if (options.interrupted && options.interrupted()) {
      reply.end = ReplyEnd::interrupted;
      break;
    }
    const auto pending = static_cast<std::int64_t>(session.pending.size());
    const auto start = Clock::now();
    const auto id = static_cast<std::int32_t>(next_id(model_, session, options.sampling, tokenizer_.vocab_size()));
    (of_prompt ? reply.prefill_ms : reply.decode_ms) += ms_since(start);
    (of_prompt ? reply.prefill_tokens : reply.decode_tokens) += pending;
    of_prompt = false;
    reply.ids.push_back(id);
    remember(session.last_ids, tokenizer_, id);
    if (id == eos_) {
      reply.end = ReplyEnd::end_of_text;
    } else if (!writer.push(id)) {
      reply.end = ReplyEnd::stop_string;
    }
  }
  const bool over = reply.end == ReplyEnd::end_of_text || reply.end == ReplyEnd::stop_string;
  if (over || !options.to_be_continued) writer.finish();
  session.held = writer.held();
  return reply;
}

}  // namespace efla::generate
