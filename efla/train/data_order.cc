#include "efla/train/data_order.h"

#include <numeric>
#include <utility>

#include "efla/base/random.h"

namespace efla::train {
namespace {

constexpr std::uint64_t kOrderStream = std::uint64_t{0x0DE5} << 48;  // apart from the streams of other uses of the seed

}  // namespace

std::vector<std::uint32_t> epoch_order(std::uint64_t seed, std::int64_t epoch, std::uint32_t count) {
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0U);
  Random random(seed, kOrderStream + static_cast<std::uint64_t>(epoch));
  for (std::uint32_t i = count; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  return order;
}

}  // namespace efla::train
