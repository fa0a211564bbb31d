#pragma once

namespace efla {

// What a gate z goes through before it multiplies: silu(z) = z σ(z), with the derivative σ(z) (1 + z (1 − σ(z))), or
// σ(z), with the derivative σ(z) (1 − σ(z)).
enum class GateActivation { silu, sigmoid };

}  // namespace efla
