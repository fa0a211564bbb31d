#include "efla/train/gradient_sum.h"

#include <algorithm>
#include <utility>

namespace efla::train {

GradientSum::GradientSum(const FlatParameters& parameters, std::vector<Range> buckets,
                         std::function<void(std::size_t)> ready)
    : parameters_(parameters),
      buckets_(std::move(buckets)),
      ready_(std::move(ready)),
      gradient_(torch::zeros({parameters.size()}, parameters.values().options())),
      sums_(parameters.entries().size()) {
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    const Range range = parameters.entries()[i].range;
    const auto overlaps = [&](const Range& bucket) { return bucket.begin < range.end && range.begin < bucket.end; };
    const auto first = std::find_if(buckets_.begin(), buckets_.end(), overlaps);
    sums_[i].first_bucket = static_cast<std::size_t>(first - buckets_.begin());
    sums_[i].last_bucket =
        static_cast<std::size_t>(std::find_if_not(first, buckets_.end(), overlaps) - buckets_.begin());
  }
}

void GradientSum::begin(std::int64_t parts) {
  parts_ = parts;
  missing_.assign(buckets_.size(), 0);
  next_bucket_ = 0;
  for (auto& sum : sums_) {
    sum.next = 0;
    sum.written = false;
    for (std::size_t bucket = sum.first_bucket; bucket < sum.last_bucket; ++bucket) ++missing_[bucket];
  }
}

void GradientSum::add(std::size_t parameter, std::int64_t part, torch::Tensor gradient) {
  Parameter& sum = sums_[parameter];
  const std::lock_guard lock(sum.mutex);
  sum.waiting.emplace(part, std::move(gradient));
  while (!sum.waiting.empty() && sum.waiting.begin()->first == sum.next) {
    accumulate(parameter, sum.waiting.begin()->second);
    sum.waiting.erase(sum.waiting.begin());
    if (++sum.next == parts_) complete(sum);
  }
}

void GradientSum::add_at_once(const std::vector<torch::Tensor>& gradients) const {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> sums, given;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    sums.push_back(parameters_.view(gradient_, parameters_.entries()[i]));
    given.push_back(gradients[i]);
  }
  if (!given.empty()) at::_foreach_add_(sums, given);
}

void GradientSum::accumulate(std::size_t parameter, const torch::Tensor& gradient) {
  const torch::NoGradGuard no_grad;
  Parameter& sum = sums_[parameter];
  const torch::Tensor into = parameters_.view(gradient_, parameters_.entries()[parameter]);
  if (gradient.defined()) {
    if (sum.written) {
      into.add_(gradient);
    } else {
      into.copy_(gradient);
    }
    sum.written = true;
  } else if (!sum.written && sum.next + 1 == parts_) {
    into.zero_();
  }
}

void GradientSum::complete(const Parameter& parameter) {
  const std::lock_guard lock(bucket_mutex_);
  for (std::size_t bucket = parameter.first_bucket; bucket < parameter.last_bucket; ++bucket) --missing_[bucket];
  for (; next_bucket_ < buckets_.size() && missing_[next_bucket_] == 0; ++next_bucket_) ready_(next_bucket_);
}

std::vector<Range> gradient_buckets(const std::vector<std::int64_t>& boundaries, std::int64_t longest) {
  std::vector<Range> buckets;
  for (std::size_t i = boundaries.size() - 1; i > 0; --i) {
    for (std::int64_t end = boundaries[i]; end > boundaries[i - 1];) {
      const std::int64_t begin = std::max(boundaries[i - 1], end - longest);
      buckets.push_back({begin, end});
      end = begin;
    }
  }
  return buckets;
}

}  // namespace efla::train
