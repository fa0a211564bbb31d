#pragma once

namespace efla {

// The function act that is applied to a gate z before the product: silu(z) = z σ(z), with the derivative σ(z) (1 + z (1
// − σ(z))), or σ(z), with the derivative σ(z) (1 − σ(z)).
enum class GateActivation { silu, sigmoid };

}  // namespace efla
