#include "efla/engine/batch_sampler.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <tuple>
#include <vector>

#include "efla/base/random.h"

namespace efla::engine {
namespace {

using torch::Tensor;

constexpr bool kNonBlocking = true;  // a copy to a GPU does not wait for the step that runs there

// A number to divide by on the device, because LibTorch's GPU kernels multiply by the reciprocal of a number of the
// host, which is rounded or infinite.
Tensor divisor(double number, const torch::TensorOptions& options) { return torch::full({}, number, options); }

// Returns the logits after the repetition penalty.
Tensor penalised_rows(const Tensor& logits, std::span<const Draw> rows, double penalty) {
  const std::int64_t vocab_size = logits.size(1);
  const Tensor bytes = torch::zeros({logits.size(0), (vocab_size + 7) / 8}, torch::kUInt8);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].seen == nullptr) continue;
    const auto& bits = rows[row].seen->bits();  // may be of a larger vocabulary
    std::copy_n(bits.begin(), bytes.size(1), bytes[static_cast<std::int64_t>(row)].data_ptr<std::uint8_t>());
  }
  const Tensor bits = torch::pow(2, torch::arange(8)).to(logits.device(), torch::kUInt8, kNonBlocking);
  const Tensor seen =
      bytes.to(logits.device(), kNonBlocking).unsqueeze(2).bitwise_and(bits).ne(0).flatten(1).narrow(1, 0, vocab_size);
  const Tensor factor = divisor(penalty, logits.options());
  return torch::where(seen, torch::where(logits < 0, logits * factor, logits / factor), logits);
}

}  // namespace

Tensor sample_rows(const Tensor& given, std::span<const Draw> rows, const SamplingOptions& options) {
  const torch::NoGradGuard no_grad;
  const double penalty = options.repetition_penalty, temperature = options.temperature;
  const Tensor logits = penalty == 1.0 ? given : penalised_rows(given, rows, penalty);
  const auto [maximum, likeliest] = logits.max(1, /*keepdim=*/true);
  const Tensor largest = maximum.to(torch::kDouble);
  if (temperature == 0.0) return torch::cat({likeliest.to(torch::kDouble), largest}, 1);

  Tensor values = logits, ids;
  const bool cut = options.top_k > 0 && options.top_k < logits.size(1);
  if (cut || options.top_p < 1.0) std::tie(values, ids) = logits.sort(/*stable=*/true, 1, /*descending=*/true);
  if (cut) values = values.narrow(1, 0, options.top_k);
  Tensor weights = ((values.to(torch::kDouble) - largest) / divisor(temperature, largest.options())).exp();
  Tensor sums = weights.cumsum(1);
  const auto total = [&] { return sums.narrow(1, sums.size(1) - 1, 1); };
  if (options.top_p < 1.0) {
    const double part = std::max(options.top_p, std::numeric_limits<double>::min());  // keeps the largest weight
    sums = weights.masked_fill_(sums - weights >= part * total(), 0.0).cumsum(1);
  }

  std::vector<double> numbers;
  for (const Draw& row : rows) {
    Random random(row.seed, row.draws);
    numbers.push_back(unit_number(random));
  }
  const Tensor place = torch::tensor(numbers, torch::kDouble).to(logits.device(), kNonBlocking).unsqueeze(1) * total();
  // Where rounding makes a place as large as the sum, the last id with a probability is drawn.
  const Tensor index =
      (sums <= torch::minimum(place, torch::nextafter(total(), torch::zeros_like(total())))).sum(1, true);
  return torch::cat({(ids.defined() ? ids.gather(1, index) : index).to(torch::kDouble), largest}, 1);
}

}  // namespace efla::engine
