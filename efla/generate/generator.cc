#include "efla/generate/generator.h"

#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/generate/prompt_lookup.h"
#include "efla/generate/stop_strings.h"
#include "efla/ops/context.h"

namespace efla::generate {
namespace {

using Clock = std::chrono::steady_clock;

// Tokens of a prompt between two calls of `interrupted`. The model cuts them further.
constexpr std::size_t kPrefillPiece = 16384;
// Tokens per call of an InferenceModel.
constexpr std::int64_t kInferencePiece = 512;

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

// Draws the next id, which becomes pending.
std::int64_t draw(std::span<const float> logits, Session& session, const SamplingOptions& options) {
  Random random(session.seed, session.draws++);
  const auto id = sample(logits, session.seen, options, random);
  session.seen.add(id);
  session.pending = {id};
  return id;
}

void require_pending(const Session& session) {
  if (!session.pending.empty()) return;
  throw Error("generate", "--prompt", "an empty text and a tokenizer without an id that begins one", "a prompt");
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
  require_pending(session);
  const auto logits = take_in(model, session, session.pending.size());
  return draw({logits.data_ptr<float>(), static_cast<std::size_t>(limit)}, session, options);
}

// Advances a session's state by its pending ids, with one model or the other. The other keeps the state elsewhere until
// the object goes.
class Generator::Advance {
 public:
  Advance(const Generator& generator, Session& session) : own_(generator), session_(session) {
    if (!own_.inference_) return;
    states_.emplace(1, own_.inference_->state_floats());
    own_.inference_->copy_state(session.state, states_->slot(0));
    logits_ = torch::empty({nn::kMostDecoded, own_.inference_->config().vocab_size});
  }
  ~Advance() {
    if (states_) own_.inference_->copy_state(states_->slot(0), session_.state);
  }
  Advance(const Advance&) = delete;
  Advance& operator=(const Advance&) = delete;

  // Takes the first `count` pending ids, of a prompt unless `decode`. Returns the logits [vocab_size] after them.
  torch::Tensor take(std::size_t count, bool decode) {
    if (!states_) return take_in(own_.model_, session_, count);
    const auto& config = own_.inference_->config();
    for (std::size_t at = 0; at < count;) {
      const std::int64_t begin = session_.state.tokens, room = kInferencePiece - begin % nn::kCutTokens;
      const std::int64_t tokens = std::min(room, static_cast<std::int64_t>(count - at));
      const auto first = session_.pending.begin() + static_cast<std::ptrdiff_t>(at);
      const std::vector<std::int32_t> ids(first, first + tokens);
      const nn::TextRun run{0, begin, tokens, decode};
      hidden_.resize(static_cast<std::size_t>(tokens * config.hidden_size));
      own_.inference_->advance(ids, {&run, 1}, *states_, rows(tokens, config.hidden_size), default_pool());
      session_.state.tokens += tokens;
      at += static_cast<std::size_t>(tokens);
      if (at < count) continue;
      compute_logits(tokens - 1, 1);
    }
    session_.pending.erase(session_.pending.begin(), session_.pending.begin() + static_cast<std::ptrdiff_t>(count));
    return logits_[0];
  }

  // Drafts tokens after the pending one: none with the model of training.
  std::span<const std::int32_t> draft(std::span<const std::int32_t> prompt, std::span<const std::int32_t> reply,
                                      std::int64_t most) {
    return states_ ? lookup_.draft(prompt, reply, most) : std::span<const std::int32_t>();
  }
  // Computes the pending id and the draft. Returns the logits [1 + draft, vocab_size] after each.
  torch::Tensor take_draft() {
    std::vector<std::int32_t> ids{static_cast<std::int32_t>(session_.pending.front())};
    ids.insert(ids.end(), lookup_.tokens().begin(), lookup_.tokens().end());
    const auto tokens = static_cast<std::int64_t>(ids.size()), width = own_.inference_->config().hidden_size;
    hidden_.resize(static_cast<std::size_t>(tokens * width));
    const nn::TextRun run{0, session_.state.tokens, tokens, /*decode=*/true};
    own_.inference_->advance(ids, {&run, 1}, *states_, rows(tokens, width), default_pool(), &drafts_);
    compute_logits(0, tokens);
    session_.pending.clear();
    return logits_.slice(0, 0, tokens);
  }
  // Advances the state by the pending id and the draft's first tokens, `tokens` in all.
  void accept(std::size_t tokens) {
    own_.inference_->accept(drafts_.front(), static_cast<std::int64_t>(tokens), *states_, default_pool());
    session_.state.tokens += static_cast<std::int64_t>(tokens);
    lookup_.end(tokens - 1);
  }

 private:
  // Computes the logits after rows of hidden_.
  void compute_logits(std::int64_t first, std::int64_t count) {
    const auto& config = own_.inference_->config();
    const auto hidden =
        View<const float, 2>::contiguous(hidden_.data() + first * config.hidden_size, {count, config.hidden_size});
    own_.inference_->logits(hidden, View<float, 2>::contiguous(logits_.data_ptr<float>(), {count, config.vocab_size}),
                            default_pool());
  }
  View<float, 2> rows(std::int64_t count, std::int64_t columns) {
    return View<float, 2>::contiguous(hidden_.data(), {count, columns});
  }

  const Generator& own_;
  Session& session_;
  std::optional<nn::StatePool> states_;
  std::vector<float> hidden_;
  torch::Tensor logits_;
  PromptLookup lookup_;
  std::vector<nn::Draft> drafts_;
};

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
  if (options.draft_tokens < 0 || options.draft_tokens >= nn::kMostDecoded) {
    throw Error("generate", "--draft-tokens", std::to_string(options.draft_tokens),
                "0 to " + std::to_string(nn::kMostDecoded - 1));
  }
  for (const auto& string : options.stop) {
    if (string.empty() || utf8_prefix(string) != string.size()) {
      throw Error("generate", "--stop", string.empty() ? "an empty text" : "a text that is not UTF-8",
                  "UTF-8 that ends the reply");
    }
  }
}

Generator::Generator(const nn::LanguageModel& model, const data::Tokenizer& tokenizer, nn::InferenceModel* inference)
    : model_(model),
      tokenizer_(tokenizer),
      inference_(inference),
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
void Generator::prefill(Advance& advance, Session& session, const ReplyOptions& options, Reply& reply) const {
  const std::size_t left = options.max_tokens == 0 ? 1 : kPrefillPiece;
  while (session.pending.size() > left && reply.end != ReplyEnd::interrupted) {
    const auto count = std::min(kPrefillPiece, session.pending.size() - 1);
    const auto start = Clock::now();
    advance.take(count, /*decode=*/false);
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
  Advance advance(*this, session);
  const std::vector<std::int32_t> text(session.pending.begin(), session.pending.end());
  prefill(advance, session, options, reply);
  bool of_prompt = !prompt.empty() || session.pending.size() > 1;  // whether pending ids are of the prompt
  while (reply.end == ReplyEnd::max_tokens && std::cmp_less(reply.ids.size(), options.max_tokens)) {
    if (options.interrupted && options.interrupted()) {
      reply.end = ReplyEnd::interrupted;
      break;
    }
    require_pending(session);
    auto start = Clock::now();
    const auto pending = session.pending.size();
    const auto left = options.max_tokens - static_cast<std::int64_t>(reply.ids.size()) - 1;
    const auto most = of_prompt ? 0 : std::min(options.draft_tokens, left);
    const auto draft = advance.draft(text, reply.ids, most);
    const auto logits = draft.empty() ? advance.take(pending, !of_prompt) : advance.take_draft();
    auto& ms = of_prompt ? reply.prefill_ms : reply.decode_ms;
    std::size_t drawn = 0;
    for (bool follows = true; follows; follows = follows && reply.end == ReplyEnd::max_tokens) {
      const float* row = logits.data_ptr<float>() + static_cast<std::int64_t>(drawn) * model_.config().vocab_size;
      const auto id = static_cast<std::int32_t>(
          draw({row, static_cast<std::size_t>(tokenizer_.vocab_size())}, session, options.sampling));
      ms += ms_since(start);
      follows = drawn < draft.size() && id == draft[drawn];
      ++drawn;
      reply.ids.push_back(id);
      remember(session.last_ids, tokenizer_, id);
      if (id == eos_) {
        reply.end = ReplyEnd::end_of_text;
      } else if (!writer.push(id)) {
        reply.end = ReplyEnd::stop_string;
      }
      start = Clock::now();
    }
    if (!draft.empty()) {
      reply.drafted_tokens += static_cast<std::int64_t>(draft.size());
      reply.accepted_tokens += static_cast<std::int64_t>(drawn) - 1;
      advance.accept(drawn);
      ms += ms_since(start);
    }
    (of_prompt ? reply.prefill_tokens : reply.decode_tokens) +=
        static_cast<std::int64_t>(draft.empty() ? pending : drawn);
    of_prompt = false;
  }
  const bool over = reply.end == ReplyEnd::end_of_text || reply.end == ReplyEnd::stop_string;
  if (over || !options.to_be_continued) writer.finish();
  session.held = writer.held();
  return reply;
}

}  // namespace efla::generate
