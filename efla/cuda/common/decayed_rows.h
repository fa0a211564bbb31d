// Which chunk kernels a rule needs.
#pragma once

#include "efla/rule/problem.h"

namespace efla::gpu {

// Returns whether `prepare` writes decayed keys and queries, which the sweeps read: where every key channel has a gate,
// and where the rule has two keys, because the decayed rows keep the keys that erase apart from the keys that write. A
// gate per head is then the gate of every channel.
constexpr bool has_decayed_rows(const DeltaRule& rule) { return rule.decay == Decay::channel || rule.two_keys; }

}  // namespace efla::gpu
