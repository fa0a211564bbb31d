#include "efla/train/lm_run.h"

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "efla/base/error.h"
#include "efla/io/event_file.h"
#include "efla/io/file.h"
#include "efla/train/metrics.h"

namespace efla::train {
namespace {

using Clock = std::chrono::steady_clock;

// What rank 0 writes about the run's course.
class Journal {
 public:
  Journal(const std::filesystem::path& folder, std::int64_t step)
      : metrics_(folder / kMetricsFile, step), events_(tensorboard_folder(folder), step + 1) {}

  Metrics& metrics() { return metrics_; }

  void write(const LmStepResult& r, double tokens_per_second, double seconds) {
    metrics_.write({{"event", "step"},
                    {"step", r.step},
                    {"tokens", r.tokens},
                    {"loss", r.loss},
                    {"lr", r.lr},
                    {"grad_norm", r.grad_norm},
                    {"tokens_per_second", tokens_per_second},
                    {"seconds", metrics_.seconds() + seconds}});
    events_.write(r.step,
                  std::array<io::Scalar, 4>{{{"train/loss", static_cast<float>(r.loss)},
                                             {"train/lr", static_cast<float>(r.lr)},
                                             {"train/grad_norm", static_cast<float>(r.grad_norm)},
                                             {"train/tokens_per_second", static_cast<float>(tokens_per_second)}}});
  }

  void write(std::int64_t step, std::int64_t tokens, const LmEvaluation& e) {
    nlohmann::ordered_json line = {
        {"event", "evaluation"}, {"step", step}, {"tokens", tokens}, {"loss", e.loss}, {"perplexity", e.perplexity}};
    std::vector<io::Scalar> scalars{{"validation/loss", static_cast<float>(e.loss)},
                                    {"validation/perplexity", static_cast<float>(e.perplexity)}};
    if (e.bits_per_byte) {
      line["bits_per_byte"] = *e.bits_per_byte;
      scalars.push_back({"validation/bits_per_byte", static_cast<float>(*e.bits_per_byte)});
    }
    line["seconds"] = metrics_.seconds();
    metrics_.write(line);
    events_.write(step, scalars);
  }

  void write(std::int64_t step, std::int64_t tokens, const std::string& sample) {
    metrics_.write(
        {{"event", "sample"}, {"step", step}, {"tokens", tokens}, {"text", sample}, {"seconds", metrics_.seconds()}});
  }

 private:
  static std::filesystem::path tensorboard_folder(const std::filesystem::path& folder) {
    const auto path = folder / "tensorboard";
    std::filesystem::create_directories(path);
    return path;
  }

  Metrics metrics_;
  io::EventFile events_;
};

class Runner {
 public:
  Runner(const LmRun& run, Replicas& replicas, Ranks& ranks, const LmRunEvents& events)
      : run_(run),
        replicas_(replicas),
        ranks_(ranks),
        events_(events),
        trainer_(replicas, *run.data.train, run.options, ranks),
        checkpoints_(run.folder) {}

  RunEnd train() {
    try {
      start();
      while (trainer_.steps_done() < run_.options.total_steps()) {
        const LmStepResult result = step();
        if (result.stop) throw Stopped();
        if (result.step == run_.options.total_steps() || every(run_.options.checkpoint_every)) save();
        observe();
      }
      return RunEnd::finished;
    } catch (const Stopped&) {
      save();
      return RunEnd::stopped;
    }
  }

 private:
  bool writes() const { return ranks_.rank() == 0; }
  bool every(std::int64_t steps) const { return steps > 0 && trainer_.steps_done() % steps == 0; }

  // Goes to the latest checkpoint, and makes up for what was due at its step.
  void start() {
    if (writes()) {
      io::remove_stale_temporaries(run_.folder);
      checkpoints_.remove_leftovers();
    }
    const auto latest = checkpoints_.latest();
    // Rank 0 says which one: the others might see one that it is about to remove.
    const auto known = ranks_.gather({latest ? static_cast<double>(latest->step) : -1.0}).front().front();
    if (known >= 0.0) {
      for (const auto& saved : checkpoints_.list()) {
        if (saved.step == static_cast<std::int64_t>(known)) restore(saved);
      }
      if (!saved_) throw Error("train lm", "RUN", "no checkpoint that rank 0 sees", "a folder that all processes see");
    }
    if (writes()) journal_ = std::make_unique<Journal>(run_.folder, trainer_.steps_done());
    const auto seen = ranks_.gather(last_steps()).front();
    evaluated_ = static_cast<std::int64_t>(seen[0]);
    sampled_ = static_cast<std::int64_t>(seen[1]);
    if (trainer_.steps_done() > 0) observe();
  }

  void restore(const CheckpointFolder::Saved& saved) {
    run_.model.read(saved.path);
    trainer_.restore(saved.path, run_.config);
    saved_ = saved;
  }

  std::vector<double> last_steps() const {
    if (!journal_) return {0.0, 0.0};
    return {static_cast<double>(journal_->metrics().last_step("evaluation")),
            static_cast<double>(journal_->metrics().last_step("sample"))};
  }

  LmStepResult step() {
    const auto start = Clock::now();
    const LmStepResult result = trainer_.step(events_.stop);
    if (!result.updated) stop_at_non_finite(result);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const double rate = static_cast<double>(result.step_tokens) / seconds;
    if (journal_) journal_->write(result, rate, seconds);
    if (events_.step) events_.step(result, rate);
    return result;
  }

  // The evaluation and the sample that are due after the steps so far.
  void observe() {
    const std::int64_t done = trainer_.steps_done();
    const bool last = done == run_.options.total_steps();
    if (run_.data.validation != nullptr && (last || every(run_.options.evaluate_every)) && evaluated_ < done) {
      if (events_.evaluating) events_.evaluating();
      const LmEvaluation evaluation =
          evaluate(replicas_, *run_.data.validation, run_.options, ranks_, run_.data.token_bytes, events_.stop);
      if (journal_) journal_->write(done, trainer_.tokens_done(), evaluation);
      if (events_.evaluated) events_.evaluated(done, evaluation);
      evaluated_ = done;
    }
    if (every(run_.options.sample_every) && sampled_ < done) {
      sampled_ = done;
      if (!writes()) return;
      const std::string text = run_.model.sample();
      journal_->write(done, trainer_.tokens_done(), text);
      if (events_.sampled) events_.sampled(done, text);
    }
  }

  void save() {
    const std::int64_t step = trainer_.steps_done();
    if (saved_ && saved_->step == step) return;
    try {
      if (writes()) {
        journal_->metrics().sync();
        checkpoints_.add(step, [&](const std::filesystem::path& folder) {
          run_.model.write(folder);
          trainer_.save(folder, run_.config);
        });
        checkpoints_.keep_newest(run_.options.keep_checkpoints);
      } else {
        trainer_.save({}, run_.config);
      }
      saved_ = {step, checkpoints_.path_of(step)};
    } catch (const IoError& error) {
      throw std::runtime_error("the checkpoint of step " + std::to_string(step) + " was not saved: " + error.what() +
                               "; " + last_good());
    }
  }

  std::string last_good() const {
    if (!saved_) return "no checkpoint had been written";
    return "the last good checkpoint is " + saved_->path.string();
  }

  [[noreturn]] void stop_at_non_finite(const LmStepResult& r) const {
    throw std::runtime_error("training stopped at step " + std::to_string(r.step) + ": loss " + std::to_string(r.loss) +
                             ", gradient norm " + std::to_string(r.grad_norm) + "; " + last_good());
  }

  const LmRun& run_;
  Replicas& replicas_;
  Ranks& ranks_;
  const LmRunEvents& events_;
  LmTrainer trainer_;
  CheckpointFolder checkpoints_;
  std::unique_ptr<Journal> journal_;  // rank 0's
  std::optional<CheckpointFolder::Saved> saved_;
  std::int64_t evaluated_ = 0, sampled_ = 0;
};

}  // namespace

RunEnd train_lm(const LmRun& run, Replicas& replicas, Ranks& ranks, const LmRunEvents& events) {
  return Runner(run, replicas, ranks, events).train();
}

}  // namespace efla::train
