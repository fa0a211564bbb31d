#include "efla/generate/generator.h"

#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "efla/base/error.h"
#include "efla/base/utf8.h"
#include "efla/generate/advance.h"
#include "efla/generate/end_ids.h"
#include "efla/generate/reply_text.h"

namespace efla::generate {
namespace {

using Clock = std::chrono::steady_clock;

// Tokens of a prompt between two calls of `interrupted`. The model cuts these pieces further.
constexpr std::size_t kPrefillPiece = 16384;

// Tokens of prompts that are prefilled together.
constexpr std::size_t kPackedTokens = 8192;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Returns how many of the first texts are prefilled together: texts whose prompts fit into kPackedTokens, at least 1.
std::size_t count_packed(std::span<const Session> sessions) {
  std::size_t count = 0, tokens = 0;
  for (const auto& session : sessions) {
    tokens += session.pending.size();
    if (session.pending.empty() || tokens > kPackedTokens) break;
    ++count;
  }
  return std::max<std::size_t>(count, 1);
}

}  // namespace

// Passes on the text of a reply, up to a stop string.
class Generator::Writer {
 public:
  Writer(const data::Tokenizer& tokenizer, const Session& session, const ReplyOptions& options, std::string& text)
      : reply_(tokenizer, options.stop, session.held, session.last_ids), on_text_(options.on_text), text_(text) {}

  // Returns false once a stop string is there.
  bool push(std::int32_t id) {
    pass_on(reply_.push(id));
    return !reply_.stopped();
  }
  void finish() { pass_on(reply_.finish()); }
  std::string held() const { return reply_.held(); }

 private:
  void pass_on(const std::string& piece) {
    text_ += piece;
    if (on_text_ && !piece.empty()) on_text_(piece);
  }

  ReplyText reply_;
  const std::function<void(std::string_view)>& on_text_;
  std::string& text_;
};

// A reply in progress.
class Generator::Progress {
 public:
  Progress(const Generator& own, Session& session, std::span<const std::int32_t> prompt, const ReplyOptions& options)
      : own_(own), session_(session), options_(options), writer_(begun(prompt), session, options, reply.text) {
    of_prompt_ = !prompt.empty() || session.pending.size() > 1;
  }

  bool is_complete() const {
    return reply.end != ReplyEnd::max_tokens || !std::cmp_less(reply.ids.size(), options_.max_tokens);
  }
  // Returns whether another id is to be drawn.
  bool goes_on() {
    if (is_complete()) return false;
    if (options_.interrupted && options_.interrupted()) reply.end = ReplyEnd::interrupted;
    return reply.end == ReplyEnd::max_tokens;
  }
  bool of_prompt() const { return of_prompt_; }  // whether the pending ids belong to a prompt

  // Adds a drawn id to the reply. Before it the state has seen `pending` ids; step and draw took `ms` milliseconds.
  void add(std::int64_t drawn, std::int64_t pending, double ms) {
    (of_prompt_ ? reply.prefill_ms : reply.decode_ms) += ms;
    (of_prompt_ ? reply.prefill_tokens : reply.decode_tokens) += pending;
    of_prompt_ = false;
    const auto id = static_cast<std::int32_t>(drawn);
    reply.ids.push_back(id);
    remember(session_.last_ids, own_.tokenizer_, id);
    if (std::find(own_.ends_.begin(), own_.ends_.end(), id) != own_.ends_.end()) {
      reply.end = ReplyEnd::end_of_text;
    } else if (!writer_.push(id)) {
      reply.end = ReplyEnd::stop_string;
    }
  }

  void finish() {
    const bool over = reply.end == ReplyEnd::end_of_text || reply.end == ReplyEnd::stop_string;
    if (over || !options_.to_be_continued) writer_.finish();
    session_.held = writer_.held();
  }

  Reply reply;

 private:
  // Adds the prompt to the session. Returns the tokenizer.
  const data::Tokenizer& begun(std::span<const std::int32_t> prompt) {
    for (const auto id : prompt) {
      session_.seen.add(id);
      remember(session_.last_ids, own_.tokenizer_, id);
    }
    session_.pending.insert(session_.pending.end(), prompt.begin(), prompt.end());
    if (!prompt.empty()) session_.held.clear();
    return own_.tokenizer_;
  }

  const Generator& own_;
  Session& session_;
  const ReplyOptions& options_;
  Writer writer_;
  bool of_prompt_;
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
    throw Error("generate", "max_tokens", std::to_string(options.max_tokens), "a count of tokens");
  }
  if (options.draft_tokens < 0 || options.draft_tokens >= nn::kMostDecoded) {
    throw Error("generate", "draft_tokens", std::to_string(options.draft_tokens),
                "0 to " + std::to_string(nn::kMostDecoded - 1));
  }
  require_stop_strings("generate", options.stop);
}

Generator::Generator(const nn::LanguageModel& model, const data::Tokenizer& tokenizer, nn::InferenceModel* inference,
                     const nn::GpuDecoder* decoder)
    : model_(model),
      tokenizer_(tokenizer),
      inference_(inference),
      decoder_(decoder),
      bos_(tokenizer.bos() >= 0 ? tokenizer.bos() : model.config().bos_token_id.value_or(-1)),
      ends_(end_ids(tokenizer, model.config())) {
  if (tokenizer.vocab_size() > model.config().vocab_size) {
    throw Error("generate", "tokenizer",
                tokenizer.info().name + " of " + std::to_string(tokenizer.vocab_size()) + " tokens",
                "at most the " + std::to_string(model.config().vocab_size) + " of the model's vocabulary");
  }
}

std::vector<std::int32_t> Generator::encode(const Session& session, std::string_view prompt, bool bos) const {
  if (const auto valid = utf8_prefix(prompt); valid != prompt.size()) {
    throw Error("generate", "prompt", "a byte at " + std::to_string(valid) + " that is not UTF-8", "UTF-8");
  }
  auto ids = tokenizer_.encode(prompt);
  if (!bos || !session.empty()) return ids;
  if (bos_ < 0 || bos_ >= tokenizer_.vocab_size()) {
    throw Error("generate", "bos", "a tokenizer without a token that begins a text", "one that has it");
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
  Progress progress(*this, session, prompt, options);
  continue_alone(session, progress, options, options.max_tokens);
  progress.finish();
  return std::move(progress.reply);
}

// Draws up to `count` ids of a reply.
void Generator::continue_alone(Session& session, Progress& progress, const ReplyOptions& options,
                               std::int64_t count) const {
  Advance advance(model_, inference_, decoder_, session);
  const std::vector<std::int32_t> text(session.pending.begin(), session.pending.end());
  prefill(advance, session, options, progress.reply);
  while (count > 0 && progress.goes_on()) {
    require_pending(session);
    const auto pending = static_cast<std::int64_t>(session.pending.size());
    const auto start = Clock::now();
    const auto most = progress.of_prompt() ? 0 : std::min(options.draft_tokens, count - 1);
    const auto draft = advance.draft(text, progress.reply.ids, most);
    if (draft.empty()) {
      const bool ahead = options.ends_session && count > 1 && !progress.of_prompt() && decoder_ != nullptr;
      const auto id = advance.draw(options.sampling, tokenizer_.vocab_size(), /*decode=*/!progress.of_prompt(), ahead);
      progress.add(id, pending, ms_since(start));
      --count;
    } else {
      count -= continue_draft(advance, session, progress, draft, options);
    }
  }
}

// Draws ids of a reply as long as they are the draft's, and the id after them. Returns the number of drawn ids.
std::int64_t Generator::continue_draft(Advance& advance, Session& session, Progress& progress,
                                       std::span<const std::int32_t> draft, const ReplyOptions& options) const {
  auto start = Clock::now();
  const auto logits = advance.take_draft();
  std::size_t drawn = 0;
  for (bool follows = true; follows && progress.reply.end == ReplyEnd::max_tokens;) {
    const float* row = logits.data_ptr<float>() + static_cast<std::int64_t>(drawn) * model_.config().vocab_size;
    const auto id = draw({row, static_cast<std::size_t>(tokenizer_.vocab_size())}, session, options.sampling);
    follows = drawn < draft.size() && id == draft[drawn];
    ++drawn;
    progress.add(id, 1, ms_since(start));
    start = Clock::now();
  }
  progress.reply.drafted_tokens += static_cast<std::int64_t>(draft.size());
  progress.reply.accepted_tokens += static_cast<std::int64_t>(drawn) - 1;
  advance.accept(drawn);
  progress.reply.decode_ms += ms_since(start);
  return static_cast<std::int64_t>(drawn);
}

void Generator::replies(std::span<Session> sessions, std::span<const std::vector<std::int32_t>> prompts,
                        const ReplyOptions& options,
                        const std::function<void(std::size_t, const Reply&)>& complete) const {
  validate(options);
  std::vector<std::unique_ptr<Progress>> all;
  std::size_t next = 0;
  const auto end_next = [&] {
    Progress& progress = *all[next++];
    if (!progress.is_complete()) return;
    progress.finish();
    complete(next - 1, progress.reply);
  };
  const auto end_complete = [&] {
    while (next < all.size() && all[next]->is_complete()) end_next();
  };
  try {
    for (std::size_t i = 0; i < sessions.size(); ++i) {
      all.push_back(std::make_unique<Progress>(*this, sessions[i], prompts[i], options));
    }
    // The prefill of a prompt draws the first id of its reply.
    for (std::size_t i = 0; i < sessions.size();) {
      const bool alone = options.max_tokens == 0 || model_.config().has_attention();
      const auto count = alone ? 1 : count_packed(sessions.subspan(i));
      if (count > 1) {
        prefill_packed(sessions.subspan(i, count), std::span(all).subspan(i, count), options);
      } else {
        continue_alone(sessions[i], *all[i], options, 1);
      }
      i += count;
      end_complete();
    }
    continue_together(sessions, all, options, end_complete);
  } catch (...) {
    while (next < all.size()) end_next();
    throw;
  }
}

// Prefills the prompts of texts, and draws an id after each.
void Generator::prefill_packed(std::span<Session> sessions, std::span<const std::unique_ptr<Progress>> all,
                               const ReplyOptions& options) const {
  std::vector<std::int64_t> ids, ends{0};
  std::vector<const nn::LanguageModelState*> before;
  std::vector<Session*> drawing;
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    auto& pending = sessions[i].pending;
    ids.insert(ids.end(), pending.begin(), pending.end());
    ends.push_back(static_cast<std::int64_t>(ids.size()));
    before.push_back(&sessions[i].state);
    drawing.push_back(all[i]->goes_on() ? &sessions[i] : nullptr);
  }
  if (std::all_of(drawing.begin(), drawing.end(), [](const Session* session) { return session == nullptr; })) return;
  const auto start = Clock::now();
  auto states = nn::LanguageModelState::joined(before);
  const auto logits = decoder_->prefill_packed(torch::tensor(ids, torch::kLong).unsqueeze(0),
                                               torch::tensor(ends, torch::kLong), states);
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    sessions[i].state = states.shared_row(row, sessions[i].state.tokens + ends[i + 1] - ends[i]);
    sessions[i].pending.clear();
  }
  double ms = -1.0;
  draw_rows({logits, {}}, drawing, options.sampling, tokenizer_.vocab_size(), [&](std::size_t i, std::int64_t id) {
    if (ms < 0.0) ms = ms_since(start) / static_cast<double>(sessions.size());
    all[i]->add(id, ends[i + 1] - ends[i], ms);
  });
}

// Draws the further ids of all replies, one of each per step, and calls end_complete after each step. The sessions'
// states stay as they are.
void Generator::continue_together(std::span<Session> sessions, std::span<const std::unique_ptr<Progress>> all,
                                  const ReplyOptions& options, const std::function<void()>& end_complete) const {
  std::vector<std::int64_t> texts;  // of each row of the joined state; some texts may have ended
  std::vector<const nn::LanguageModelState*> states;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!all[i]->goes_on()) continue;
    texts.push_back(static_cast<std::int64_t>(i));
    states.push_back(&sessions[i].state);
  }
  if (texts.empty()) return end_complete();
  auto state = nn::LanguageModelState::joined(states);
  std::optional<nn::GpuDecoder::Output> ahead;  // output for the pending ids, if that step was launched
  for (;;) {
    std::vector<std::int64_t> rows;  // rows of texts that go on
    for (std::size_t row = 0; row < texts.size(); ++row) {
      if (all[static_cast<std::size_t>(texts[row])]->goes_on()) rows.push_back(static_cast<std::int64_t>(row));
    }
    end_complete();
    if (rows.empty()) return;
    bool shrinks = 2 * rows.size() <= texts.size();  // only by half, because every size has a CUDA graph
    if (shrinks && !ahead) {
      shrinks = false;
      state = state.selected(rows);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        texts[i] = texts[static_cast<std::size_t>(rows[i])];
        rows[i] = static_cast<std::int64_t>(i);
      }
      texts.resize(rows.size());
    }
    std::vector<std::int64_t> ids(texts.size());
    std::vector<Session*> drawing(texts.size(), nullptr);
    bool another_step = false;  // whether a text may need an id after this one
    for (const auto row : rows) {
      const auto text = static_cast<std::size_t>(texts[static_cast<std::size_t>(row)]);
      ids[static_cast<std::size_t>(row)] = sessions[text].pending[0];
      drawing[static_cast<std::size_t>(row)] = &sessions[text];
      another_step = another_step || std::cmp_less(all[text]->reply.ids.size() + 1, options.max_tokens);
    }
    const auto start = Clock::now();
    const auto output =
        ahead ? *std::exchange(ahead, std::nullopt) : decoder_->step(torch::tensor(ids, torch::kLong), state);
    std::function<void(const torch::Tensor&)> go_on;
    if (another_step && !shrinks)
      go_on = [&](const torch::Tensor& drawn) { ahead = decoder_->step_drawn(drawn, state); };
    double ms = -1.0;
    const auto add = [&](std::size_t row, std::int64_t id) {
      if (ms < 0.0) ms = ms_since(start) / static_cast<double>(rows.size());
      all[static_cast<std::size_t>(texts[row])]->add(id, 1, ms);
    };
    draw_rows(output, drawing, options.sampling, tokenizer_.vocab_size(), add, go_on);
  }
}

}  // namespace efla::generate
