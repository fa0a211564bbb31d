// The results of a case by name.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tests/support/delta_case.h"

namespace efla::test {

// The forward's or the backward's results by name, in row-major order.
using Results = std::vector<std::pair<std::string, std::vector<double>>>;

template <class T>
Results forward_results(const DeltaData<T>& data) {
  Results results{{"o", data.o.values()}};
  if (auto values = data.final_state.values(); !values.empty()) results.emplace_back("final_state", std::move(values));
  return results;
}

template <class T>
Results backward_results(const DeltaData<T>& data) {
  Results results{
      {"dq", data.dq.values()}, {"dk", data.dk.values()}, {"dv", data.dv.values()}, {"dbeta", data.dbeta.values()}};
  if (auto values = data.derase_key.values(); !values.empty()) results.emplace_back("derase_key", std::move(values));
  if (auto values = data.dg.values(); !values.empty()) results.emplace_back("dg", std::move(values));
  if (auto values = data.dinitial_state.values(); !values.empty()) {
    results.emplace_back("dinitial_state", std::move(values));
  }
  return results;
}

// Returns the forward's results, then the backward's.
template <class T>
Results all_results(const DeltaData<T>& data) {
  Results results = forward_results(data);
  for (auto& result : backward_results(data)) results.push_back(std::move(result));
  return results;
}

}  // namespace efla::test
