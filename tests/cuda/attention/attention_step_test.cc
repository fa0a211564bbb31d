// An attention layer's part of a decode step on the GPU against the float64 reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "efla/base/random.h"
#include "efla/cuda/attention/attention_step.h"
#include "efla/ref/attention_step.h"
#include "tests/cuda/device.h"
#include "tests/support/compare.h"

namespace efla::test {
namespace {

struct AttentionCase {
  std::int64_t heads = 8, groups = 2, dim = 256, rotary = 64;
  bool gated = true, per_head = true;
  std::vector<std::int64_t> lengths = {0};  // of the texts before the step; −1: an entry without a text
};

std::string text_of(const AttentionCase& c) {
  std::string text = std::to_string(c.heads) + "/" + std::to_string(c.groups) + " heads of " + std::to_string(c.dim) +
                     " rotary " + std::to_string(c.rotary) + (c.gated ? " gated" : "") +
                     (c.per_head ? "" : " row norm");
  for (const auto length : c.lengths) text += " " + std::to_string(length);
  return text;
}

constexpr std::int64_t kUnused = 3;  // elements before the keys, so that the layer is not the page's first one

// The tensors of a step. The pages of all texts lie in one tensor. Elements of tokens that do not exist are NaN.
template <class S>
struct AttentionData {
  AttentionCase c;
  AttentionShape shape;
  Tensor<float, 2> qkv, o;
  Tensor<float, 1> q_norm, k_norm;
  std::int64_t most_pages = 1;
  Tensor<S, 3> pages;  // [slots, most_pages, elements]
  std::vector<std::int64_t> slots, positions;

  explicit AttentionData(const AttentionCase& from) : c(from), shape{c.heads, c.groups, c.dim, c.dim} {
    Random random(static_cast<std::uint64_t>(c.heads + c.dim));
    const auto batch = std::ssize(c.lengths);
    for (std::int64_t b = 0; b < batch; ++b) {
      const auto length = c.lengths[static_cast<std::size_t>(b)];
      slots.push_back(length < 0 ? -1 : batch - 1 - b);
      positions.push_back(std::max<std::int64_t>(length, 0));
      most_pages = std::max(most_pages, shape.pages_for(length + 1));
    }
    AttentionStep<S> p;
    p.shape = shape;
    p.gated = c.gated;
    qkv = random_tensor<float, 2, Layout::sliced>({batch, p.value_column(c.groups)}, random, 2.0);
    q_norm = random_tensor<float, 1>({c.per_head ? c.dim : c.heads * c.dim}, random);
    k_norm = random_tensor<float, 1>({c.per_head ? c.dim : c.groups * c.dim}, random);
    o = Tensor<float, 2>({batch, c.heads * c.dim}, Layout::sliced);
    pages = Tensor<S, 3>({batch, most_pages, page_elements()});
    pages.assign(std::vector<double>(static_cast<std::size_t>(pages.view().size()), std::nan("")));
    for (std::int64_t b = 0; b < batch; ++b) fill(b, random);
  }
  std::int64_t key_offset() const { return kUnused * 16; }
  std::int64_t value_offset() const { return key_offset() + shape.key_page_elements(); }
  std::int64_t page_elements() const { return (value_offset() + shape.value_page_elements() + 15) / 16 * 16; }

  // Draws the keys and values of a text's tokens.
  void fill(std::int64_t b, Random& random) {
    const auto slot = slots[static_cast<std::size_t>(b)];
    for (std::int64_t t = 0; t < c.lengths[static_cast<std::size_t>(b)]; ++t) {
      S* const page = pages.view().at(slot, t / shape.page_tokens);
      const std::int64_t at = t % shape.page_tokens;
      for (std::int64_t g = 0; g < c.groups; ++g) {
        for (std::int64_t i = 0; i < c.dim; ++i) {
          page[key_offset() + (g * c.dim + i) * shape.page_tokens + at] =
              from_state<S>(static_cast<float>(random.normal()));
          page[value_offset() + (g * shape.page_tokens + at) * c.dim + i] =
              from_state<S>(static_cast<float>(random.normal()));
        }
      }
    }
  }
  // Returns the addresses of the pages, which begin at `first`.
  std::vector<S*> addresses(S* first) const {
    std::vector<S*> all;
    for (std::int64_t n = 0; n < std::ssize(slots) * most_pages; ++n) all.push_back(first + n * page_elements());
    return all;
  }
  AttentionStep<S> problem() {
    AttentionStep<S> p;
    p.shape = shape;
    p.qkv = qkv.view();
    p.gated = c.gated;
    p.q_norm = q_norm.view();
    p.k_norm = k_norm.view();
    p.norm_eps = 1e-5F;
    p.rotary = c.rotary;
    p.theta = 1e7;
    p.slots = View<const std::int64_t, 1>::contiguous(slots.data(), {std::ssize(slots)});
    p.positions = View<const std::int64_t, 1>::contiguous(positions.data(), {std::ssize(slots)});
    p.table.key_offset = key_offset();
    p.table.value_offset = value_offset();
    p.o = o.view();
    return p;
  }
  View<S* const, 2> table_of(const std::vector<S*>& all) const {
    return View<S* const, 2>::contiguous(all.data(), {std::ssize(slots), most_pages});
  }
};

// A copy of a vector on the device.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& host) : memory_(host.size() * sizeof(T)) {
    gpu::check(cudaMemcpy(memory_.data(), host.data(), memory_.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  T* data() const { return static_cast<T*>(memory_.data()); }

 private:
  DeviceBytes memory_;
};

// Runs a step once, and then twice in a graph, on the device.
template <class S>
void run_on_gpu(AttentionData<S>& data) {
  const DeviceTensor<float, 2> qkv(data.qkv), o(data.o);
  const DeviceTensor<float, 1> q_norm(data.q_norm), k_norm(data.k_norm);
  const DeviceTensor<S, 3> pages(data.pages);
  const OnDevice<S*> table(data.addresses(pages.view().data));
  const OnDevice<std::int64_t> slots(data.slots), positions(data.positions);
  const std::int64_t pairs = std::ssize(data.slots) * data.c.groups;
  const OnDevice<std::int32_t> arrivals(std::vector<std::int32_t>(static_cast<std::size_t>(pairs)));
  AttentionStep<S> p = data.problem();
  p.qkv = qkv.view();
  p.o = o.view();
  p.q_norm = q_norm.view();
  p.k_norm = k_norm.view();
  p.slots.data = slots.data();
  p.positions.data = positions.data();
  p.arrivals = View<std::int32_t, 1>::contiguous(arrivals.data(), {pairs});
  p.table.pages = View<S* const, 2>::contiguous(table.data(), {std::ssize(data.slots), data.most_pages});
  ASSERT_EQ(gpu::attention_step_refusal(p), "");
  const PoisonedWorkspace workspace(gpu::attention_step_workspace_bytes(p));
  gpu::attention_step(p, workspace.get(), nullptr);
  gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  o.download();
  const auto first = data.o.values();
  workspace.poison();
  replay_in_graph([&](cudaStream_t stream) { gpu::attention_step(p, workspace.get(), stream); });
  o.download();
  pages.download();
  EXPECT_EQ(data.o.values(), first);
  EXPECT_TRUE(workspace.guards_intact());
}

template <class S>
void check_step(const AttentionCase& c) {
  SCOPED_TRACE(text_of(c) + (sizeof(S) == 2 ? " bfloat16" : ""));
  AttentionData<S> expected(c), got(c);
  AttentionStep<S> p = expected.problem();
  const auto addresses = expected.addresses(expected.pages.view().data);
  p.table.pages = expected.table_of(addresses);
  ref::attention_step(p);
  run_on_gpu(got);
  EXPECT_TRUE(got.o.sentinels_intact() && got.pages.sentinels_intact());
  EXPECT_LE(distance(got.o.values(), expected.o.values()).rms, sizeof(S) == 2 ? 1e-3 : tolerance_of("float32").cap);
  // The new keys and values, which may round differently where they are halfway.
  const auto own = got.pages.values(), reference = expected.pages.values();
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (std::isnan(reference[i])) {
      ASSERT_TRUE(std::isnan(own[i])) << i;
    } else {
      ASSERT_NEAR(own[i], reference[i], (sizeof(S) == 2 ? 1e-2 : 1e-5) * (1 + std::abs(reference[i]))) << i;
    }
  }
}

class CudaAttentionStep : public testing::Test {
 protected:
  void SetUp() override {
    const auto reason = why_no_gpu();
    if (!reason.empty()) GTEST_SKIP() << reason;
    AttentionData<float> data(AttentionCase{});
    const auto refusal = gpu::attention_step_refusal(data.problem());
    if (!refusal.empty()) GTEST_SKIP() << refusal;
  }
};

TEST_F(CudaAttentionStep, IsTheFloat64Step) {
  for (const std::int64_t length : {0, 1, 63, 64, 127, 1000, 5000}) {
    check_step<float>({.lengths = {length}});
    check_step<bfloat16>({.lengths = {length}});
  }
  check_step<bfloat16>({.heads = 16, .groups = 4, .lengths = {3, 300, -1, 0, 130}});
}

TEST_F(CudaAttentionStep, TakesAnyHeads) {
  for (const std::int64_t group : {1, 2, 3, 7}) {
    for (const std::int64_t dim : {4, 20, 36, 96, 128, 256}) {
      for (const bool per_head : {false, true}) {
        const AttentionCase c{.heads = 3 * group,
                              .groups = 3,
                              .dim = dim,
                              .rotary = per_head ? dim / 4 * 2 : 0,
                              .gated = per_head,
                              .per_head = per_head,
                              .lengths = {70, -1, 5, 200}};
        check_step<float>(c);
        check_step<bfloat16>(c);
      }
    }
  }
}

// Many texts leave each thread block several parts.
TEST_F(CudaAttentionStep, ATextHasTheSameBitsWhateverIsBesideIt) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t b = 0; b < 64; ++b) lengths.push_back(b * 37 % 400);
  AttentionData<bfloat16> all({.lengths = lengths});
  run_on_gpu(all);
  for (const std::int64_t b : {0, 5, 11, 63}) {
    AttentionData<bfloat16> one({.lengths = {lengths[static_cast<std::size_t>(b)]}});
    const auto& view = all.qkv.view();
    for (std::int64_t i = 0; i < view.extent[1]; ++i) one.qkv.view()(0, i) = view(b, i);
    for (std::int64_t n = 0; n < one.most_pages; ++n) {
      const bfloat16* const from = all.pages.view().at(all.slots[static_cast<std::size_t>(b)], n);
      std::copy_n(from, one.page_elements(), one.pages.view().at(0, n));
    }
    for (std::int64_t i = 0; i < one.c.dim; ++i) {
      one.q_norm.view()(i) = all.q_norm.view()(i);
      one.k_norm.view()(i) = all.k_norm.view()(i);
    }
    run_on_gpu(one);
    for (std::int64_t i = 0; i < one.o.view().extent[1]; ++i) {
      ASSERT_EQ(one.o.view()(0, i), all.o.view()(b, i)) << b << " " << i;
    }
  }
}

TEST_F(CudaAttentionStep, CopiesKeysAndValuesToPagesAndBack) {
  AttentionData<bfloat16> data({.lengths = {100}});
  const DeviceTensor<bfloat16, 3> pages(data.pages);
  const OnDevice<bfloat16*> table(data.addresses(pages.view().data));
  std::vector<std::int64_t> slots(100, 0), positions;
  for (std::int64_t t = 0; t < 100; ++t) positions.push_back(t);
  const OnDevice<std::int64_t> to_slots(slots), to_positions(positions);
  Random random(1);
  auto keys = random_tensor<bfloat16, 3>({100, 2, 256}, random),
       values = random_tensor<bfloat16, 3>({100, 2, 256}, random);
  const auto written_keys = keys.values(), written_values = values.values();
  const DeviceTensor<bfloat16, 3> device_keys(keys), device_values(values);
  PageCopy<bfloat16> p{data.shape,
                       true,
                       View<const std::int64_t, 1>::contiguous(to_slots.data(), {100}),
                       View<const std::int64_t, 1>::contiguous(to_positions.data(), {100}),
                       {View<bfloat16* const, 2>::contiguous(table.data(), {1, data.most_pages}), data.key_offset(),
                        data.value_offset()},
                       device_keys.view(),
                       device_values.view()};
  gpu::copy_pages(p, nullptr);
  gpu::check(cudaMemset(device_keys.view().data, 0, written_keys.size() * 2), "cudaMemset");
  gpu::check(cudaMemset(device_values.view().data, 0, written_values.size() * 2), "cudaMemset");
  p.to_pages = false;
  gpu::copy_pages(p, nullptr);
  gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  device_keys.download();
  device_values.download();
  pages.download();
  EXPECT_EQ(keys.values(), written_keys);
  EXPECT_EQ(values.values(), written_values);
  EXPECT_EQ(to_float(data.pages.view()(0, 1, data.key_offset() + 5 * 64 + 2)), written_keys[(66 * 2 + 0) * 256 + 5]);
}

}  // namespace
}  // namespace efla::test
