#include "efla/ops/layers/short_conv.h"

#include <cstdint>
#include <string>
#include <vector>

#include "efla/cpu/short_conv.h"
#include "efla/ref/short_conv.h"

#ifdef EFLA_HAS_CUDA
#include "efla/cuda/layers/short_conv.h"
#include "efla/ops/cuda_call.h"
#endif

namespace efla {
namespace {

template <class T>
bool has_contiguous_channels(const View<T, 3>& view) {
  return view.extent[2] == 1 || view.stride[2] == 1;
}

constexpr const char* kNeedsContiguousChannels = "it needs the channels of a token side by side in memory";

template <class T>
std::string refuse_strided_conv(const ShortConvForward<T>& p, bool) {
  return has_contiguous_channels(p.x) && has_contiguous_channels(p.y) ? "" : kNeedsContiguousChannels;
}

template <class T>
std::string refuse_strided_conv(const ShortConvBackward<T>& p, bool) {
  const bool contiguous =
      has_contiguous_channels(p.x) && has_contiguous_channels(p.dy) && has_contiguous_channels(p.dx);
  return contiguous ? "" : kNeedsContiguousChannels;
}

// Returns tokens [begin, end) of a view over [B, T, D] with B = 1.
template <class T>
View<T, 3> tokens_of(View<T, 3> view, std::int64_t begin, std::int64_t end) {
  view.data = view.at(std::int64_t{0}, begin);
  view.extent[1] = end - begin;
  return view;
}

// Calls f(begin, end) for every sequence that has tokens.
template <class F>
void for_each_packed(const View<const std::int64_t, 1>& cu_seqlens, F&& f) {
  for (std::int64_t n = 0; n + 1 < cu_seqlens.extent[0]; ++n) {
    if (cu_seqlens(n) < cu_seqlens(n + 1)) f(cu_seqlens(n), cu_seqlens(n + 1));
  }
}

template <class T>
void run_simd_conv(const ShortConvForward<T>& p, const ExecutionContext& context) {
  if (!p.cu_seqlens) return cpu::short_conv(p, context.threads());
  for_each_packed(p.cu_seqlens, [&](std::int64_t begin, std::int64_t end) {
    cpu::short_conv(ShortConvForward<T>{tokens_of(p.x, begin, end), p.weight, tokens_of(p.y, begin, end)},
                    context.threads());
  });
}

// Adds the gradients of the weight in the order of the sequences.
template <class T>
void run_simd_conv(const ShortConvBackward<T>& p, const ExecutionContext& context) {
  if (!p.cu_seqlens) return cpu::short_conv(p, context.threads());
  const auto [channels, width] = p.dweight.extent;
  std::vector<float> sum(static_cast<std::size_t>(channels * width)), one(sum.size());
  const auto dweight = View<float, 2>::contiguous(one.data(), {channels, width});
  bool first = true;
  for_each_packed(p.cu_seqlens, [&](std::int64_t begin, std::int64_t end) {
    cpu::short_conv(ShortConvBackward<T>{tokens_of(p.x, begin, end), p.weight, tokens_of(p.dy, begin, end),
                                         tokens_of(p.dx, begin, end), dweight},
                    context.threads());
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = first ? one[i] : sum[i] + one[i];
    first = false;
  });
  for (std::int64_t d = 0; d < channels; ++d) {
    for (std::int64_t j = 0; j < width; ++j) p.dweight(d, j) = sum[static_cast<std::size_t>(d * width + j)];
  }
}

#ifdef EFLA_HAS_CUDA

template <class T>
void run_cuda_conv(const ShortConvForward<T>& p, const ExecutionContext& context) {
  call_on_gpu(context, 0, [&](const gpu::Workspace&, cudaStream_t stream) { gpu::short_conv(p, stream); });
}

template <class T>
void run_cuda_conv(const ShortConvBackward<T>& p, const ExecutionContext& context) {
  call_on_gpu(context, gpu::short_conv_workspace_bytes(p),
              [&](const gpu::Workspace& workspace, cudaStream_t stream) { gpu::short_conv(p, workspace, stream); });
}

#endif

template <class Problem>
std::span<const Implementation<Problem>> short_conv_rows() {
  static const Implementation<Problem> rows[]{
      {"simd", "simd", Device::Kind::cpu, refuse_strided_conv, run_simd_conv},
      {"cuda", "cuda", Device::Kind::cuda, EFLA_CUDA_ROW(refuse_strided_conv, run_cuda_conv)},
      {"ref", "ref", Device::Kind::cpu, refuse_unless_named<Problem>,
       [](const Problem& p, const ExecutionContext&) { ref::short_conv(p); }},
  };
  return rows;
}

}  // namespace

template <class T>
Choice short_conv_forward(const ShortConvForward<T>& problem, const RunOptions& options) {
  validate(problem, options.context.device);
  return choose_and_run("short_conv_forward", short_conv_rows<ShortConvForward<T>>(), problem, options);
}

template <class T>
Choice short_conv_backward(const ShortConvBackward<T>& problem, const RunOptions& options) {
  validate(problem, options.context.device);
  return choose_and_run("short_conv_backward", short_conv_rows<ShortConvBackward<T>>(), problem, options);
}

template Choice short_conv_forward(const ShortConvForward<float>&, const RunOptions&);
template Choice short_conv_forward(const ShortConvForward<bfloat16>&, const RunOptions&);
template Choice short_conv_backward(const ShortConvBackward<float>&, const RunOptions&);
template Choice short_conv_backward(const ShortConvBackward<bfloat16>&, const RunOptions&);

std::vector<ImplementationName> short_conv_implementations() {
  return names_of(short_conv_rows<ShortConvForward<float>>());
}

}  // namespace efla
