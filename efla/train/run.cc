#include "efla/train/run.h"

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "efla/base/error.h"
#include "efla/io/file.h"

namespace efla::train {
namespace {

using nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

class Runner {
 public:
  Runner(const Run& run, Task& task, DataParallel& model, const UpdateOptions& update, ProcessGroup& group,
         const RunEvents& events)
      : run_(run),
        task_(task),
        model_(model),
        group_(group),
        events_(events),
        trainer_(task, model, update, group),
        checkpoints_(run.folder) {}

  RunEnd train() {
    try {
      start();
      while (!enough_ && !last()) {
        const StepResult result = step();
        if (result.stop) throw Stopped();
        if (last() || every(run_.options.checkpoint_every)) save();
        observe();
      }
      return RunEnd::finished;
    } catch (const Stopped&) {
      save();
      return RunEnd::stopped;
    }
  }

 private:
  bool writes() const { return group_.rank() == 0; }
  bool last() const { return trainer_.steps_done() >= task_.steps(); }
  bool every(std::int64_t steps) const { return steps > 0 && trainer_.steps_done() % steps == 0; }

  // Resumes from the latest checkpoint, and makes the evaluation and the sample that were due at its step.
  void start() {
    if (writes()) {
      io::remove_stale_temporaries(run_.folder);
      checkpoints_.remove_leftovers();
    }
    const auto latest = checkpoints_.latest();
    // Rank 0 chooses the checkpoint, because the others might see one that rank 0 is about to remove.
    const auto known = group_.gather({latest ? static_cast<double>(latest->step) : -1.0}).front().front();
    if (known >= 0.0) {
      for (const auto& saved : checkpoints_.list()) {
        if (saved.step == static_cast<std::int64_t>(known)) restore(saved);
      }
      if (!saved_) throw Error("train", "folder", "no checkpoint that rank 0 sees", "a folder that all processes see");
    }
    if (writes()) log_ = std::make_unique<MetricsLog>(run_.folder, trainer_.steps_done());
    const auto seen = group_.gather(seen_so_far()).front();
    evaluated_ = static_cast<std::int64_t>(seen[0]);
    sampled_ = static_cast<std::int64_t>(seen[1]);
    enough_ = seen[2] > 0.0;
    remove_old_checkpoints();  // which an earlier process could not remove, now that every rank has read the newest
    if (trainer_.steps_done() > 0 && !enough_) observe();
  }

  void restore(const io::CheckpointFolder::Saved& saved) {
    trainer_.restore(saved.path, run_.config);
    saved_ = saved;
  }

  // Returns the steps of the last evaluation and the last sample, and whether that evaluation was enough.
  std::vector<double> seen_so_far() const {
    if (!log_) return {0.0, 0.0, 0.0};
    const auto evaluation = log_->last("evaluation"), sample = log_->last("sample");
    const auto step_of = [](const auto& line) { return line ? line->at("step").template get<double>() : 0.0; };
    return {step_of(evaluation), step_of(sample), evaluation && task_.enough(*evaluation) ? 1.0 : 0.0};
  }

  // Returns the beginning of a line of metrics.
  ordered_json line_of(const char* event) const {
    ordered_json line = {{"event", event}, {"step", trainer_.steps_done()}};
    line.update(task_.progress(trainer_.steps_done(), trainer_.examples_done()));
    return line;
  }

  StepResult step() {
    const auto start = Clock::now();
    const StepResult result = trainer_.step(events_.stop);
    if (!result.updated) {
      // The sign of a NaN says nothing.
      const auto text = [](double value) { return std::isnan(value) ? "nan" : std::to_string(value); };
      throw NonFinite("training stopped at step " + std::to_string(result.step) + ": loss " + text(result.loss) +
                      ", gradient norm " + text(result.grad_norm) + "; " + last_good());
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const double rate = static_cast<double>(result.step_examples) / seconds;
    if (log_) {
      ordered_json line = line_of("step");
      line["loss"] = result.loss;
      if (task_.counts_correct()) line["accuracy"] = result.accuracy;
      line["lr"] = result.lr;
      line["grad_norm"] = result.grad_norm;
      line[task_.unit() + "_per_second"] = rate;
      log_->write(line, "train", seconds);
    }
    if (events_.step) events_.step(result, rate);
    return result;
  }

  ordered_json evaluate() const {
    try {
      return task_.evaluate(model_, group_, events_.stop);
    } catch (const NonFinite& error) {
      const std::int64_t done = trainer_.steps_done();
      throw NonFinite("training stopped after step " + std::to_string(done) + ": " + error.what() + "; " +
                      (saved_ && saved_->step == done ? "the checkpoint " + saved_->path.string() + " has this model"
                                                      : last_good()));
    }
  }

  // Makes the evaluation and the sample that are due after the steps so far.
  void observe() {
    const RunOptions& options = run_.options;
    const std::int64_t done = trainer_.steps_done();
    if (options.evaluate && (last() || every(options.evaluate_every)) && evaluated_ < done) {
      const std::chrono::duration<double> pause(options.checkpoint_pause);
      if (options.checkpoint_evaluated && Clock::now() - saved_at_ >= pause) save();
      if (events_.evaluating) events_.evaluating(done);
      const ordered_json evaluation = evaluate();
      if (log_) {
        ordered_json line = line_of("evaluation");
        line.update(evaluation);
        log_->write(line, "validation");
      }
      if (events_.evaluated) events_.evaluated(done, evaluation);
      evaluated_ = done;
      enough_ = task_.enough(evaluation);
    }
    if (every(options.sample_every) && sampled_ < done) {
      sampled_ = done;
      if (!writes()) return;
      ordered_json line = line_of("sample");
      line["text"] = task_.sample();
      log_->write(line, "sample");
      if (events_.sampled) events_.sampled(done, line.at("text").get<std::string>());
    }
  }

  void save() {
    const std::int64_t step = trainer_.steps_done();
    if (saved_ && saved_->step == step) return;
    try {
      if (writes()) {
        log_->sync();
        checkpoints_.add(step, [&](const std::filesystem::path& folder) { trainer_.save(folder, run_.config); });
      } else {
        trainer_.save({}, run_.config);
      }
    } catch (const IoError& error) {
      throw std::runtime_error("the checkpoint of step " + std::to_string(step) + " was not saved: " + error.what() +
                               "; " + last_good());
    }
    saved_ = {step, checkpoints_.path_of(step)};
    saved_at_ = Clock::now();
    remove_old_checkpoints();
  }

  void remove_old_checkpoints() {
    if (!writes()) return;
    try {
      checkpoints_.keep_newest(run_.options.keep_checkpoints);
    } catch (const IoError& error) {
      throw std::runtime_error(std::string("an old checkpoint was not removed: ") + error.what() + "; " + last_good());
    }
  }

  std::string last_good() const {
    if (!saved_) return "no checkpoint had been written";
    return "the last good checkpoint is " + saved_->path.string();
  }

  const Run& run_;
  Task& task_;
  DataParallel& model_;
  ProcessGroup& group_;
  const RunEvents& events_;
  Trainer trainer_;
  io::CheckpointFolder checkpoints_;
  std::unique_ptr<MetricsLog> log_;  // rank 0's
  std::optional<io::CheckpointFolder::Saved> saved_;
  Clock::time_point saved_at_ = Clock::now();
  std::int64_t evaluated_ = 0, sampled_ = 0;  // steps of the last evaluation and sample
  bool enough_ = false;
};

}  // namespace

RunEnd train_in_folder(const Run& run, Task& task, DataParallel& model, const UpdateOptions& update,
                       ProcessGroup& group, const RunEvents& events) {
  return Runner(run, task, model, update, group, events).train();
}

}  // namespace efla::train
