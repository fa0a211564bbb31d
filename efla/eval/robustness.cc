#include "efla/eval/robustness.h"

#include <torch/nn/functional/loss.h>

#include <algorithm>
#include <atomic>
#include <nlohmann/json.hpp>
#include <numeric>

#include "efla/torch/one_thread.h"

namespace efla::eval {
namespace {

bool disturbs_nothing(const Perturbation& p) {
  return p.kind == Perturbation::Kind::none || p.level == (p.kind == Perturbation::Kind::scale ? 1.0 : 0.0);
}

}  // namespace

Evaluation evaluate(const Classifier& classifier, const data::ImageSet& images, ThreadPool& pool,
                    const Perturbation& perturbation, std::uint64_t seed, const StopFunction& stop) {
  const std::int64_t count = images.count;
  const torch::Device device = nn::device_of(classifier.parameters);
  const std::int64_t size = micro_batch(device), parts = (count + size - 1) / size;
  std::vector<double> loss(parts);
  std::vector<std::int64_t> correct(parts);
  std::atomic<bool> stopped = false;
  libtorch::run_tasks(pool, device, parts, [&](std::int64_t part) {
    if (stopped || (stop && stop())) {
      stopped = true;
      return;
    }
    const torch::NoGradGuard no_grad;
    std::vector<std::uint32_t> indices(std::min(size, count - part * size));
    std::iota(indices.begin(), indices.end(), static_cast<std::uint32_t>(part * size));
    const Batch batch = make_batch(images, indices, perturbation, seed, device);
    const torch::Tensor logits = classifier.forward(batch.pixels);
    namespace functional = torch::nn::functional;
    loss[part] =
        functional::cross_entropy(logits, batch.labels, functional::CrossEntropyFuncOptions().reduction(torch::kSum))
            .item<double>();
    correct[part] = count_correct(logits, batch.labels).item<std::int64_t>();
  });
  if (stopped) throw Stopped();
  const auto images_measured = static_cast<double>(count);
  return {std::accumulate(loss.begin(), loss.end(), 0.0) / images_measured,
          static_cast<double>(std::accumulate(correct.begin(), correct.end(), std::int64_t{0})) / images_measured};
}

Robustness measure_robustness(const Classifier& classifier, const data::ImageSet& images, ThreadPool& pool,
                              std::uint64_t seed, const StopFunction& stop,
                              const std::function<void(int done, int all)>& progress) {
  const auto& panels = robustness_panels();
  int all = 1, done = 0;
  for (const auto& panel : panels) {
    for (const double level : panel.levels) all += !disturbs_nothing({panel.kind, level});
  }
  const auto measure = [&](const Perturbation& perturbation) {
    const Evaluation result = evaluate(classifier, images, pool, perturbation, seed, stop);
    if (progress) progress(++done, all);
    return result;
  };
  Robustness robustness{measure({}), {}};
  for (const auto& panel : panels) {
    auto& accuracy = robustness.accuracy.emplace_back();
    for (const double level : panel.levels) {
      const Perturbation perturbation{panel.kind, level};
      accuracy.push_back((disturbs_nothing(perturbation) ? robustness.clean : measure(perturbation)).accuracy);
    }
  }
  return robustness;
}

nlohmann::ordered_json to_json(const Robustness& robustness) {
  nlohmann::ordered_json json = {{"clean_accuracy", robustness.clean.accuracy}};
  for (std::size_t i = 0; i < robustness_panels().size(); ++i) {
    const Panel& panel = robustness_panels()[i];
    auto& points = json[std::string(panel.name)] = nlohmann::ordered_json::array();
    for (std::size_t j = 0; j < panel.levels.size(); ++j) {
      points.push_back({{std::string(panel.level_name), panel.levels[j]}, {"accuracy", robustness.accuracy[i][j]}});
    }
  }
  return json;
}

}  // namespace efla::eval
