// Rules with two keys whose keys are equal are rules with one key.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/compare.h"
#include "tests/support/delta_run.h"

namespace efla::test {
namespace {

DeltaCase two_key_case(Decay decay, bool qk_l2norm) {
  DeltaCase c{"exact", 1, 1, qk_l2norm, 2, 70, 2, 32, 20, 2, Layout::sliced, true, true, true};
  c.decay = decay;
  c.group = 2;
  c.erase_key = EraseKey::gated;
  return c;
}

// Expects that κ = k as a tensor of its own gives the bits of one key.
template <class T>
void expect_one_key(const std::string& forward, const std::string& backward, Decay decay, bool qk_l2norm) {
  SCOPED_TRACE(testing::Message() << forward << ' ' << cpu::target_name() << " decay " << name_of(decay));
  ThreadPool pool(1);
  DeltaCase c = two_key_case(decay, qk_l2norm);
  DeltaData<T> two(c);
  c.erase_key = EraseKey::none;
  DeltaData<T> one(c);
  two.erase_key.assign(one.k.values());
  for (auto* data : {&one, &two}) run_forward(forward, *data, pool);
  EXPECT_EQ(forward_results(one), forward_results(two));
  if (backward.empty()) return;
  for (auto* data : {&one, &two}) run_backward(backward, *data, pool);
  std::vector<double> sum = two.dk.values();
  const std::vector<double> dkappa = two.derase_key.values(), dk = one.dk.values();
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += dkappa[i];
  EXPECT_LE(distance(sum, dk).rms, tolerance_of(DTypeOf<T>::name).floor) << "dk + dκ";
  EXPECT_EQ(two.dv.values(), one.dv.values());
}

TEST(TwoKeys, ThatAreEqualAreOneKey) {
  for (const Decay decay : {Decay::none, Decay::scalar, Decay::channel}) {
    for (const bool qk_l2norm : {false, true}) {
      expect_one_key<double>("ref", "recurrent", decay, qk_l2norm);
      for (const std::string& target : cpu::supported_targets()) {
        const OnTarget guard(target);
        for (const char* row : {"chunk_simd", "recurrent_simd", "step"}) {
          const char* backward = row == std::string("chunk_simd") ? row : "";
          expect_one_key<float>(row, backward, decay, qk_l2norm);
          expect_one_key<bfloat16>(row, "", decay, qk_l2norm);
        }
      }
    }
  }
}

}  // namespace
}  // namespace efla::test
