// Metrics in Prometheus' text format.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "efla/engine/engine.h"

namespace efla::serve {

// Returns all metrics. replies: numbers of replies by status. request_bytes: of memory that requests hold.
std::string metrics_text(const engine::Statistics& statistics, const std::map<int, std::uint64_t>& replies,
                         std::int64_t connections, std::int64_t request_bytes);

}  // namespace efla::serve
