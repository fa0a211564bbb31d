// Keys and queries that are hard for chunks: all around one direction.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "efla/base/random.h"
#include "tests/support/delta_case.h"

namespace efla::test {

// Keys and queries around one direction: the unit vector along u + spread · ε with ε standard normal in every
// component, times a length; log-normal lengths where asked for.
template <class T>
void draw_cone(DeltaData<T>& data, double spread, bool log_normal) {
  const DeltaShape& s = data.shape;
  Random random(23);
  const std::vector<double> u = drawn_keys(1, s.key_dim, 1, 0, random);
  double length_of_u = 0;
  for (const double x : u) length_of_u += x * x / static_cast<double>(s.key_dim);
  for (auto* tensor : {&data.q, &data.k}) {
    std::vector<double> values;
    for (std::int64_t row = 0; row < s.batch * s.tokens * s.heads; ++row) {
      std::vector<double> x;
      double squares = 0;
      for (std::int64_t i = 0; i < s.key_dim; ++i) {
        x.push_back(u[i] / std::sqrt(length_of_u * static_cast<double>(s.key_dim)) + spread * random.normal());
        squares += x.back() * x.back();
      }
      const double length = log_normal && tensor == &data.k ? std::exp(0.5 * random.normal()) : 1.0;
      for (const double e : x) values.push_back(e * length / std::sqrt(squares));
    }
    tensor->assign(values);
  }
}

}  // namespace efla::test
