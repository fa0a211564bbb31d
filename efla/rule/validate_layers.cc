#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "efla/base/error.h"
#include "efla/rule/add_rms_norm.h"
#include "efla/rule/check.h"
#include "efla/rule/cross_entropy.h"
#include "efla/rule/decay_gate.h"
#include "efla/rule/glu.h"
#include "efla/rule/linear.h"
#include "efla/rule/rms_norm.h"
#include "efla/rule/short_conv.h"

namespace efla {
namespace {

// Checks a view that is required only if the expected shape has elements, because tensors without elements may have no
// address.
template <class T, int Rank>
void check_filled(const char* operation, const char* name, const View<T, Rank>& view,
                  const std::type_identity_t<std::array<std::int64_t, Rank>>& expected) {
  if (std::any_of(view.extent.begin(), view.extent.end(), [](std::int64_t n) { return n < 0; })) {
    throw Error(operation, name, "shape " + shape_text(view.extent.data(), Rank), "a shape without negative extents");
  }
  const bool is_empty = std::find(expected.begin(), expected.end(), 0) != expected.end();
  check_view(operation, name, view, expected, is_empty ? Presence::optional : Presence::required);
}

// Checks the members that a forward and a backward have in common.
template <class Problem>
void check_short_conv(const char* operation, const Problem& p, const Device& device) {
  check_filled(operation, "x", p.x, p.x.extent);
  check_size(operation, "filter width W", p.weight.extent[1], 1, kMaxConvWidth);
  check_filled(operation, "weight", p.weight, {p.x.extent[2], p.weight.extent[1]});
  if (!p.cu_seqlens) return;
  check_cu_seqlens(operation, p.cu_seqlens, p.cu_seqlens.extent[0] - 1, p.x.extent[0], p.x.extent[1], device);
}

void check_eps(const char* operation, float eps) {
  if (!(eps > 0) || !std::isfinite(eps)) throw Error(operation, "eps", value_text(eps), "a positive number");
}

template <class Problem>
void check_rms_norm(const char* operation, const Problem& p) {
  check_filled(operation, "x", p.x, p.x.extent);
  check_view(operation, "weight", p.weight, {p.x.extent[1]}, Presence::optional);
  check_view(operation, "gate", p.gate, p.x.extent, Presence::optional);
  check_eps(operation, p.eps);
}

template <class Problem>
void check_decay_gate(const char* operation, const Problem& p) {
  const std::int64_t columns = p.z.extent[1], heads = p.a_log.extent[0];
  check_filled(operation, "z", p.z, p.z.extent);
  check_filled(operation, "bias", p.bias, {columns});
  check_size(operation, "heads HV", heads, 1);
  if (columns % heads != 0) {
    throw Error(operation, "columns of z", std::to_string(columns),
                "a multiple of the " + std::to_string(heads) + " heads of a_log");
  }
  check_view(operation, "a_log", p.a_log, {heads});
  if (p.activation == DecayActivation::sigmoid && !(p.bound < 0 && std::isfinite(p.bound))) {
    throw Error(operation, "bound", value_text(p.bound), "a negative number");
  }
}

}  // namespace

template <class T>
void validate(const ShortConvForward<T>& p, const Device& device) {
  constexpr const char* op = "short_conv_forward";
  check_short_conv(op, p, device);
  check_filled(op, "y", p.y, p.x.extent);
}

template <class T>
void validate(const ShortConvBackward<T>& p, const Device& device) {
  constexpr const char* op = "short_conv_backward";
  check_short_conv(op, p, device);
  check_filled(op, "dy", p.dy, p.x.extent);
  check_filled(op, "dx", p.dx, p.x.extent);
  check_filled(op, "dweight", p.dweight, p.weight.extent);
}

template <class T>
void validate(const RmsNormForward<T>& p) {
  constexpr const char* op = "rms_norm_forward";
  check_rms_norm(op, p);
  check_filled(op, "y", p.y, p.x.extent);
}

template <class T>
void validate(const RmsNormBackward<T>& p) {
  constexpr const char* op = "rms_norm_backward";
  check_rms_norm(op, p);
  check_filled(op, "dy", p.dy, p.x.extent);
  check_filled(op, "dx", p.dx, p.x.extent);
  check_view(op, "dweight", p.dweight, {p.x.extent[1]}, Presence::optional);
  if (p.gate) check_filled(op, "dgate", p.dgate, p.x.extent);
}

template <class T>
void validate(const AddRmsNormForward<T>& p) {
  constexpr const char* op = "add_rms_norm_forward";
  check_filled(op, "x", p.x, p.x.extent);
  check_view(op, "branch", p.branch, p.x.extent, Presence::optional);
  check_filled(op, "weight", p.weight, {p.x.extent[1]});
  check_eps(op, p.eps);
  if (p.branch) check_filled(op, "sum", p.sum, p.x.extent);
  check_filled(op, "y", p.y, p.x.extent);
}

template <class T>
void validate(const AddRmsNormBackward<T>& p) {
  constexpr const char* op = "add_rms_norm_backward";
  check_filled(op, "sum", p.sum, p.sum.extent);
  check_filled(op, "weight", p.weight, {p.sum.extent[1]});
  check_eps(op, p.eps);
  check_filled(op, "dy", p.dy, p.sum.extent);
  check_view(op, "dsum", p.dsum, p.sum.extent, Presence::optional);
  check_filled(op, "dx", p.dx, p.sum.extent);
  check_view(op, "dbranch", p.dbranch, p.sum.extent, Presence::optional);
  check_filled(op, "dweight", p.dweight, {p.sum.extent[1]});
}

template <class T>
void validate(const GluForward<T>& p) {
  constexpr const char* op = "glu_forward";
  check_filled(op, "gate", p.gate, p.gate.extent);
  check_filled(op, "up", p.up, p.gate.extent);
  check_filled(op, "y", p.y, p.gate.extent);
}

template <class T>
void validate(const GluBackward<T>& p) {
  constexpr const char* op = "glu_backward";
  check_filled(op, "gate", p.gate, p.gate.extent);
  check_filled(op, "up", p.up, p.gate.extent);
  check_filled(op, "dy", p.dy, p.gate.extent);
  check_filled(op, "dgate", p.dgate, p.gate.extent);
  check_filled(op, "dup", p.dup, p.gate.extent);
  check_view(op, "y", p.y, p.gate.extent, Presence::optional);
}

template <class T>
void validate(const DecayGateForward<T>& p) {
  constexpr const char* op = "decay_gate_forward";
  check_decay_gate(op, p);
  check_filled(op, "g", p.g, p.z.extent);
}

template <class T>
void validate(const DecayGateBackward<T>& p) {
  constexpr const char* op = "decay_gate_backward";
  check_decay_gate(op, p);
  check_filled(op, "dg", p.dg, p.z.extent);
  check_filled(op, "dz", p.dz, p.z.extent);
  check_filled(op, "dbias", p.dbias, p.bias.extent);
  check_view(op, "da_log", p.da_log, p.a_log.extent);
}

template <class T>
void validate(const CrossEntropy<T>& p, const Device& device) {
  constexpr const char* op = "cross_entropy";
  check_filled(op, "logits", p.logits, p.logits.extent);
  check_size(op, "columns V", p.logits.extent[1], 1, std::numeric_limits<std::int32_t>::max());
  check_filled(op, "targets", p.targets, {p.logits.extent[0]});
  check_view(op, "share", p.share, {1}, Presence::optional);
  check_filled(op, "loss", p.loss, {p.logits.extent[0]});
  if (!device.is_cpu()) return;
  for (std::int64_t n = 0; n < p.targets.extent[0]; ++n) {
    const std::int64_t target = p.targets(n);
    if (target != kIgnoreIndex && (target < 0 || target >= p.logits.extent[1])) {
      throw Error(op, "targets[" + std::to_string(n) + "]", std::to_string(target),
                  std::to_string(kIgnoreIndex) + " or 0 to " + std::to_string(p.logits.extent[1] - 1));
    }
  }
}

namespace {

// Checks that the rows of a matrix have this number of columns in whole blocks.
void check_quantised(const char* op, const QuantMatrix& weight, std::int64_t columns) {
  if (weight.columns != columns) {
    throw Error(op, "columns of quant_weight", std::to_string(weight.columns), std::to_string(columns));
  }
  if (const std::int64_t block = layout_of(weight.type).elements; columns % block != 0) {
    throw Error(op, "columns of quant_weight", std::to_string(columns), "a multiple of " + std::to_string(block));
  }
}

}  // namespace

void validate(const LinearForward& p) {
  constexpr const char* op = "linear_forward";
  check_filled(op, "x", p.x, p.x.extent);
  const std::int64_t outputs = p.outputs(), columns = p.x.extent[1];
  if (p.quant_weight) {
    check_quantised(op, p.quant_weight, columns);
  } else if (p.narrow_weight) {
    check_filled(op, "narrow_weight", p.narrow_weight, {outputs, columns});
  } else if (p.byte_weight) {
    check_filled(op, "byte_weight", p.byte_weight, {outputs, columns});
    check_filled(op, "scales", p.scales, {outputs, (columns + kScaleBlock - 1) / kScaleBlock});
  } else {
    check_filled(op, "weight", p.weight, {outputs, columns});
  }
  if (p.swiglu && outputs % 2 != 0) throw Error(op, "outputs N", std::to_string(outputs), "an even number with swiglu");
  check_view(op, "norm_weight", p.norm_weight, {columns}, Presence::optional);
  if (p.norm_weight) check_eps(op, p.norm_eps);
  const std::array<std::int64_t, 2> y_shape{p.x.extent[0], p.swiglu ? outputs / 2 : outputs};
  check_view(op, "residual", p.residual, y_shape, Presence::optional);
  check_filled(op, "y", p.y, y_shape);
}

template void validate(const ShortConvForward<float>&, const Device&);
template void validate(const ShortConvForward<bfloat16>&, const Device&);
template void validate(const ShortConvBackward<float>&, const Device&);
template void validate(const ShortConvBackward<bfloat16>&, const Device&);
template void validate(const RmsNormForward<float>&);
template void validate(const RmsNormForward<bfloat16>&);
template void validate(const RmsNormBackward<float>&);
template void validate(const RmsNormBackward<bfloat16>&);
template void validate(const AddRmsNormForward<float>&);
template void validate(const AddRmsNormForward<bfloat16>&);
template void validate(const AddRmsNormBackward<float>&);
template void validate(const AddRmsNormBackward<bfloat16>&);
template void validate(const CrossEntropy<float>&, const Device&);
template void validate(const CrossEntropy<bfloat16>&, const Device&);
template void validate(const DecayGateForward<float>&);
template void validate(const DecayGateForward<bfloat16>&);
template void validate(const DecayGateBackward<float>&);
template void validate(const DecayGateBackward<bfloat16>&);
template void validate(const GluForward<float>&);
template void validate(const GluForward<bfloat16>&);
template void validate(const GluBackward<float>&);
template void validate(const GluBackward<bfloat16>&);

}  // namespace efla
