#include "efla/train/run.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>

#include "efla/io/file.h"
#include "efla/train/metrics.h"

namespace efla::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// FNV-1a over eight bytes at a time: tells data sets apart, guards against nothing.
class Digest {
 public:
  void add(const std::vector<std::uint8_t>& bytes) {
    for (std::size_t i = 0; i < bytes.size(); ++i) hash_ = (hash_ ^ bytes[i]) * 0x100000001B3U;
  }
  std::string text() const {
    std::array<char, 17> digits{};
    std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(hash_));
    return digits.data();
  }

 private:
  std::uint64_t hash_ = 0xCBF29CE484222325U;
};

nlohmann::ordered_json line_of(const StepResult& r, double images_per_second, double seconds) {
  return {
      {"event", "step"},        {"step", r.step}, {"epoch", r.epoch},         {"loss", r.loss},
      {"accuracy", r.accuracy}, {"lr", r.lr},     {"grad_norm", r.grad_norm}, {"images_per_second", images_per_second},
      {"seconds", seconds}};
}

nlohmann::ordered_json line_of(std::int64_t step, std::int64_t epoch, const Evaluation& e, double seconds) {
  return {{"event", "evaluation"}, {"step", step},           {"epoch", epoch},
          {"loss", e.loss},        {"accuracy", e.accuracy}, {"seconds", seconds}};
}

[[noreturn]] void stop_at_non_finite(const StepResult& r, const std::filesystem::path& checkpoint,
                                     std::optional<std::int64_t> saved) {
  std::string message = "training stopped at step " + std::to_string(r.step) + ": loss " + std::to_string(r.loss) +
                        ", gradient norm " + std::to_string(r.grad_norm) + "; ";
  message += saved ? "the last good checkpoint is " + checkpoint.string() + " of step " + std::to_string(*saved)
                   : "no checkpoint had been written";
  throw std::runtime_error(message);
}

}  // namespace

nlohmann::json description(const RunSpec& spec) {
  return {{"model", spec.model}, {"data", spec.data}, {"training", to_json(spec.training)}};
}

nlohmann::json describe(const std::string& source, const data::ImageSet& train, const data::ImageSet& test) {
  Digest digest;
  for (const auto* set : {&train, &test}) {
    digest.add(set->pixels);
    digest.add(set->labels);
  }
  return {{"source", source}, {"train_images", train.count}, {"test_images", test.count}, {"digest", digest.text()}};
}

RunEnd train_in_folder(const std::filesystem::path& folder, const RunSpec& spec, const Classifier& classifier,
                       const data::ImageSet& train, const data::ImageSet& test, ThreadPool& pool,
                       const RunEvents& events) {
  io::remove_stale_temporaries(folder);
  const auto path = folder / kCheckpointFile;
  const auto run = description(spec);
  Trainer trainer(classifier, train, spec.training, pool);
  std::optional<std::int64_t> saved;
  if (std::filesystem::exists(path)) {
    trainer.restore(path, run);
    saved = trainer.steps_done();
  }
  Metrics metrics(folder / kMetricsFile, trainer.steps_done());
  const auto save = [&] {
    if (saved == trainer.steps_done()) return;
    trainer.save(path, run);
    saved = trainer.steps_done();
  };
  try {
    for (;;) {
      const std::int64_t done = trainer.steps_done();
      if (done > 0 && done % trainer.steps_per_epoch() == 0 && metrics.last_step("evaluation") < done) {
        save();
        const std::int64_t epoch = done / trainer.steps_per_epoch();
        if (events.evaluating) events.evaluating(epoch);
        const Evaluation evaluation = evaluate(classifier, test, pool, {}, 0, events.stop);
        metrics.write(line_of(done, epoch, evaluation, metrics.seconds()));
        if (events.evaluated) events.evaluated(epoch, evaluation);
      }
      if (done == trainer.total_steps()) return RunEnd::finished;
      if (spec.checkpoint_every > 0 && done % spec.checkpoint_every == 0) save();
      if (events.stop && events.stop()) throw Stopped();
      const auto start = Clock::now();
      const StepResult result = trainer.step();
      if (!result.updated) stop_at_non_finite(result, path, saved);
      const double seconds = seconds_since(start);
      const double rate = static_cast<double>(result.images) / seconds;
      metrics.write(line_of(result, rate, metrics.seconds() + seconds));
      if (events.step) events.step(result, rate, metrics.seconds());
    }
  } catch (const Stopped&) {
    save();
    return RunEnd::stopped;
  }
}

}  // namespace efla::train
