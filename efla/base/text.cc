#include "efla/base/text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <limits>
#include <numeric>

namespace efla {

std::string nearest_name(std::string_view name, const std::vector<std::string>& names) {
  std::string best;
  std::size_t least = std::numeric_limits<std::size_t>::max();
  for (const auto& candidate : names) {
    std::vector<std::size_t> row(candidate.size() + 1);  // Levenshtein distances from a prefix of name
    std::iota(row.begin(), row.end(), std::size_t{0});
    for (std::size_t i = 0; i < name.size(); ++i) {
      std::size_t diagonal = row[0];
      row[0] = i + 1;
      for (std::size_t j = 0; j < candidate.size(); ++j) {
        const std::size_t above = row[j + 1];
        row[j + 1] = std::min({above + 1, row[j] + 1, diagonal + (name[i] == candidate[j] ? 0U : 1U)});
        diagonal = above;
      }
    }
    const bool begun = !name.empty() && candidate.starts_with(name);  // "warmup" suggests "warmup_steps", not "lr"
    const std::size_t distance = begun ? std::min<std::size_t>(row.back(), 1) : row.back();
    if (distance < least) {
      least = distance;
      best = candidate;
    }
  }
  return best;
}

std::string shape_text(const std::int64_t* extent, int rank) {
  std::string text = "[";
  for (int d = 0; d < rank; ++d) text += (d ? ", " : "") + std::to_string(extent[d]);
  return text + "]";
}

std::string value_text(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

}  // namespace efla
