// The operators on tensors of a GPU: which rows run, that they are the kernels' results, and where memory comes from.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "efla/cuda/device.h"
#include "efla/ops/delta.h"
#include "efla/ops/gpu.h"
#include "tests/cuda/device.h"
#include "tests/support/compare.h"
#include "tests/support/delta_cases.h"
#include "tests/support/delta_results.h"
#include "tests/support/delta_run.h"

namespace efla::test {
namespace {

constexpr ExecutionContext kGpu{.device = {Device::Kind::cuda, 0}};

DeltaCase small_case() {
  DeltaCase c;
  c.batch = 2;
  c.tokens = 70;
  c.heads = 2;
  c.key_dim = c.value_dim = 64;
  c.final_state = true;
  return c;
}

template <class T>
DeltaForward<T> without_states(DeltaForward<T> p) {
  p.chunk_states = {};
  return p;
}

// Has the forward save states as `saved` says, in the memory that it has for more of them.
template <class T>
void save_states_as(const SavedStates& saved, DeltaForward<T>& p) {
  const DeltaShape& s = p.shape;
  p.saved = saved;
  p.chunk_states = View<State<T>, 5>::contiguous(
      p.chunk_states.data, {s.batch, s.chunks(saved.interval), s.value_heads, s.key_dim, s.value_dim});
}

template <class E>
void expect_chunks() {
  const DeltaCase c = small_case();
  DeltaData<E> data(c), direct(c);
  DeviceData<E> device(data), device_direct(direct);
  const Choice ran = delta_forward(without_states(device.forward()), {.context = kGpu});
  device.download();
  EXPECT_EQ(ran.implementation, "chunk_cuda");
  EXPECT_EQ(ran.device, Device::Kind::cuda);
  PoisonedWorkspace workspace(gpu::chunk_fwd_workspace_bytes(c.shape(), c.rule()));
  gpu::chunk_fwd(without_states(device_direct.forward()), workspace.get(), nullptr);
  device_direct.download();
  EXPECT_TRUE(data.o.same_bits(direct.o) && data.final_state.same_bits(direct.final_state));
}

TEST(CudaOps, ChunksInBfloat16AreTheKernels) { expect_chunks<bfloat16>(); }
TEST(CudaOps, ChunksInFloat16AreTheKernels) { expect_chunks<float16>(); }

TEST(CudaOps, EveryRowIsRunOrSaysWhyNot) {
  DeltaCase c = small_case();
  const auto expect_refusal = [&](const std::string& reason) {
    DeltaData<bfloat16> data(c);
    DeviceData<bfloat16> device(data);
    const Choice ran = delta_forward(without_states(device.forward()), {.context = kGpu});
    EXPECT_EQ(ran.implementation, "recurrent_cuda");
    EXPECT_EQ(ran.refusals.back().implementation, "chunk_cuda");
    EXPECT_EQ(ran.refusals.back().reason, "it does not take keys of more than 128 dimensions " + reason);
    EXPECT_THROW(delta_forward(without_states(device.forward()), {.implementation = "chunk", .context = kGpu}), Error);
  };
  c.key_dim = 250;
  expect_refusal("where K or V is not a multiple of 8");
  c.key_dim = 256;
  c.layout = Layout::column_major;
  expect_refusal("in rows that are not aligned to 16 bytes");
  c.layout = Layout::contiguous;
  c.decay = Decay::channel;
  expect_refusal("with a decay per key channel");
  c.decay = Decay::none;
  c.erase_key = EraseKey::gated;
  expect_refusal("with two keys");
  DeltaCase gated = small_case();
  gated.decay = Decay::channel;
  DeltaData<float> wide(gated);
  DeviceData<float> device_wide(wide);
  const Choice of_float32 = delta_forward(without_states(device_wide.forward()), {.context = kGpu});
  EXPECT_EQ(of_float32.implementation, "chunk_cuda");
  DeltaData<float16> half(gated);
  DeviceData<float16> device_half(half);
  EXPECT_EQ(delta_forward(without_states(device_half.forward()), {.context = kGpu}).implementation, "chunk_cuda");
  for (const std::string name : {"chunk_simd", "ref"}) {
    EXPECT_THROW(delta_forward(without_states(device_wide.forward()), {.implementation = name, .context = kGpu}),
                 Error);
  }
  gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

TEST(CudaOps, FewTokensAreTheRecurrences) {
  DeltaCase c = small_case();
  c.tokens = 4;
  DeltaData<bfloat16> data(c);
  DeviceData<bfloat16> device(data);
  const DeltaForward<bfloat16> p = without_states(device.forward());
  EXPECT_EQ(delta_forward(p, {.context = kGpu}).implementation, "recurrent_cuda");
  EXPECT_EQ(delta_forward(p, {.implementation = "chunk", .context = kGpu}).implementation, "chunk_cuda");
  gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

TEST(CudaOps, SavedStatesAreThoseOfTheRowThatIsChosen) {
  const DeltaCase c = small_case();
  DeltaData<bfloat16> data(c);
  DeviceData<bfloat16> device(data);
  DeltaForward<bfloat16> p = device.forward();
  const Choice choice = choose_delta_forward(p, {.context = kGpu});
  save_states_as(choice.saved, p);
  EXPECT_EQ(delta_forward(p, {.context = kGpu}).implementation, choice.implementation);
  gpu::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void expect_gradients(EraseKey erase_key) {
  DeltaCase c = small_case();
  c.erase_key = erase_key;
  c.decay = Decay::scalar;
  c.group = 2;
  c.initial_state = c.dfinal_state = true;
  DeltaData<float> data(c);
  DeltaData<double> exact(c, data);
  delta_forward(exact.forward(), {.implementation = "ref"});
  delta_backward(exact.backward(), {.implementation = "ref"});
  DeviceData<float> device(data);
  DeltaForward<float> forward = device.forward();
  DeltaBackward<float> backward = device.backward();
  save_states_as(choose_saved_states<float>(data.shape, data.rule, {.context = kGpu}), forward);
  backward.saved = forward.saved;
  backward.chunk_states = forward.chunk_states;
  EXPECT_EQ(delta_forward(forward, {.context = kGpu}).implementation, "chunk_cuda");
  EXPECT_EQ(delta_backward(backward, {.context = kGpu}).implementation, "chunk_cuda");
  device.download();
  const double cap = tolerance_of("float32").cap;
  const Results got = backward_results(data), expected = backward_results(exact);
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_LE(distance(got[i].second, expected[i].second).rms, cap) << got[i].first;
  }
}

TEST(CudaOps, GradientsAreThoseOfTheReference) { expect_gradients(EraseKey::none); }
TEST(CudaOps, GradientsWithTwoKeysAreThoseOfTheReference) { expect_gradients(EraseKey::gated); }

// chunk_bwd_test compares the kernels with float64.
TEST(CudaOps, GradientsByChunksAreTheKernels) {
  for (const auto& [decay, erase_key] :
       {std::pair{Decay::scalar, EraseKey::none}, {Decay::channel, EraseKey::none}, {Decay::scalar, EraseKey::gated}}) {
    DeltaCase c = small_case();
    c.tokens = 1200;
    c.decay = decay;
    c.erase_key = erase_key;
    c.group = 2;
    c.initial_state = c.dfinal_state = true;
    DeltaData<bfloat16> data(c), direct(c);
    const DeviceData<bfloat16> device(data), device_direct(direct);
    const SavedStates saved = choose_saved_states<bfloat16>(data.shape, data.rule, {.context = kGpu});
    EXPECT_GT(data.shape.chunks(saved.interval), 1);
    DeltaForward<bfloat16> forward = device.forward(), forward_direct = device_direct.forward();
    save_states_as(saved, forward);
    save_states_as(saved, forward_direct);
    EXPECT_EQ(delta_forward(forward, {.context = kGpu}).implementation, "chunk_cuda");
    const PoisonedWorkspace forward_workspace(gpu::chunk_fwd_workspace_bytes(data.shape, data.rule));
    gpu::chunk_fwd(forward_direct, forward_workspace.get(), nullptr);
    DeltaBackward<bfloat16> backward = device.backward(), backward_direct = device_direct.backward();
    backward.saved = backward_direct.saved = saved;
    backward.chunk_states = forward.chunk_states;
    backward_direct.chunk_states = forward_direct.chunk_states;
    EXPECT_EQ(delta_backward(backward, {.context = kGpu}).implementation, "chunk_cuda");
    const PoisonedWorkspace workspace(gpu::chunk_bwd_workspace_bytes(data.shape, data.rule));
    gpu::chunk_bwd(backward_direct, workspace.get(), nullptr);
    device.download();
    device_direct.download();
    EXPECT_EQ(backward_results(data), backward_results(direct));
  }
}

void expect_steps_are_the_forward(EraseKey erase_key) {
  DeltaCase c = small_case();
  c.erase_key = erase_key;
  c.tokens = 5;
  DeltaData<float> data(c), steps(c);
  DeviceData<float> device(data), device_steps(steps);
  delta_forward(without_states(device.forward()), {.context = kGpu});
  const DeltaForward<float> p = device_steps.forward();
  gpu::check(cudaMemset(p.final_state.data, 0, p.final_state.size() * sizeof(float)), "cudaMemset");
  run_steps(p, p.final_state, {.context = kGpu});
  device.download();
  device_steps.download();
  EXPECT_LE(distance(steps.o.values(), data.o.values()).rms, 1e-6);
  EXPECT_LE(distance(steps.final_state.values(), data.final_state.values()).rms, 1e-6);
}

TEST(CudaOps, StepsAreTheForward) { expect_steps_are_the_forward(EraseKey::none); }
TEST(CudaOps, StepsWithTwoKeysAreTheForward) { expect_steps_are_the_forward(EraseKey::gated); }

TEST(CudaOps, TheCallerGivesTheWorkspace) {
  static int calls;
  calls = 0;
  ExecutionContext context = kGpu;
  context.allocate = [](std::size_t bytes, const ExecutionContext& given) {
    ++calls;
    EXPECT_EQ(given.device.index, 0);
    return gpu::allocate(bytes);
  };
  DeltaData<bfloat16> data(small_case()), again(small_case());
  DeviceData<bfloat16> device(data), device_again(again);
  delta_forward(without_states(device.forward()), {.context = context});
  delta_forward(without_states(device_again.forward()), {.context = kGpu});
  device.download();
  device_again.download();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(data.o.same_bits(again.o));
}

TEST(CudaOps, MemoryIsCopiedThereAndBack) {
  const Gpus gpus = find_gpus();
  ASSERT_FALSE(gpus.found.empty());
  EXPECT_EQ(gpus.absence, "");
  EXPECT_GT(gpus.found.front().memory_bytes, std::size_t{1} << 30);
  const std::vector<int> written{1, 2, 3};
  std::vector<int> read(3);
  const GpuMemory memory(kGpu.device, sizeof(int) * 3);
  memory.write(written.data());
  memory.read(read.data());
  EXPECT_EQ(read, written);
}

}  // namespace
}  // namespace efla::test
