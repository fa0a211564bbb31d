// The cases, in order, and how a result is written.
#include "bench/cuda/suite.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/cuda/case.h"
#include "bench/cuda/timing.h"
#include "efla/base/error.h"
#include "efla/cuda/common/launch.h"
#include "efla/cuda/device.h"

namespace efla::bench::cuda {
namespace {

std::string text_of(const char* format, double x) {
  char text[40];
  std::snprintf(text, sizeof(text), format, x);
  return text;
}

std::vector<Row> scaling_rows() {
  std::vector<Row> rows;
  for (std::int64_t tokens = 1024; tokens <= 262'144; tokens *= 4) {
    rows.push_back({"1x" + std::to_string(tokens) + "x16", 1, tokens, 16, 16, 0});
  }
  return rows;
}

// A case with the work of timing it, or of no work while names are listed.
struct Plan {
  std::string name;
  std::function<void(CaseRun&, const std::string& name)> time;
};

std::vector<Plan> plans(const GpuOptions& options) {
  std::vector<Plan> plans;
  const std::vector<Row> rows = options.scaling ? scaling_rows() : std::vector<Row>(std::begin(kRows), std::end(kRows));
  std::vector<Row> rows_of_float32;
  if (!options.scaling) {
    rows_of_float32 = rows;
    rows_of_float32.push_back({"128x784x1", 128, 784, 1, 1, 0});  // images pixel by pixel
  }
  for (const std::int64_t dim : {256, 128, 64}) {
    const bool divided = dim > 128;  // keys that only Hopper GPUs take, with one key and no gate per key channel
    for (const Rule& rule : rules()) {
      if (divided && (rule.rule.decay == Decay::channel || rule.rule.two_keys || !gpu::is_hopper())) continue;
      for (const Row& row : rows) {
        const std::string end = "/" + std::string(rule.name) + "/d" + std::to_string(dim) + "/" + row.name;
        for (const std::string algorithm : {"chunk", "portable", "sweep", "fused", "recurrent"}) {
          if ((algorithm == "sweep" || algorithm == "fused") && !gpu::is_hopper()) continue;
          if (options.scaling && algorithm != "chunk") continue;
          if (algorithm != "chunk" && (algorithm == "recurrent") != divided) continue;
          for (const std::int64_t interval : {std::int64_t{0}, kTrainingInterval<>}) {
            plans.push_back({(interval > 0 ? "forward-saving" : "forward") + end + "/" + algorithm,
                             [=](CaseRun& run, const std::string& name) {
                               Case<> c(row, dim, rule);
                               time_forward(run, name, c, row, rule, algorithm, interval);
                             }});
          }
        }
        for (const std::string algorithm : {"chunk", "recurrent"}) {
          if (algorithm == "recurrent" && !divided) continue;
          plans.push_back({"forward+backward" + end + "/" + algorithm, [=](CaseRun& run, const std::string& name) {
                             Case<> c(row, dim, rule);
                             time_backward(run, name, c, row, rule, algorithm);
                           }});
        }
      }
      for (const Row& row : rows) {
        const std::string end =
            "/" + std::string(rule.name) + " float16/d" + std::to_string(dim) + "/" + row.name + "/";
        for (const std::int64_t interval : {std::int64_t{0}, kTrainingInterval<>}) {
          plans.push_back({(interval > 0 ? "forward-saving" : "forward") + end + "chunk",
                           [=](CaseRun& run, const std::string& name) {
                             Case<float16> c(row, dim, rule);
                             time_forward(run, name, c, row, rule, "chunk", interval);
                           }});
        }
        plans.push_back({"forward+backward" + end + "chunk", [=](CaseRun& run, const std::string& name) {
                           Case<float16> c(row, dim, rule);
                           time_backward(run, name, c, row, rule, "chunk");
                         }});
      }
      for (const Row& row : rows_of_float32) {
        if (dim > gpu::kFloat32MaxKeyDim) continue;  // by the recurrence alone
        for (const char* algorithm : {"chunk", "recurrent"}) {
          plans.push_back(
              {"float32/" + std::string(rule.name) + "/d" + std::to_string(dim) + "/" + row.name + "/" + algorithm,
               [=](CaseRun& run, const std::string& name) { time_float32(run, name, row, dim, rule, algorithm); }});
        }
      }
      for (const std::int64_t batch : {1, 64, 256}) {
        for (const std::int64_t tokens : {1, 4, 8}) {
          for (const bool narrow : {false, true}) {
            if (options.scaling) continue;
            plans.push_back({"decode/" + std::string(rule.name) + "/d" + std::to_string(dim) + "/" +
                                 std::to_string(batch) + "x" + std::to_string(tokens) + "x16/" +
                                 (narrow ? "bfloat16" : "float32"),
                             [=](CaseRun& run, const std::string& name) {
                               time_step(run, name, batch, tokens, dim, rule, narrow);
                             }});
          }
        }
      }
    }
  }
  for (const char* layer : {"short_conv", "rms_norm", "rms_norm gated", "add_rms_norm", "glu", "decay_gate"}) {
    for (const bool backward : {false, true}) {
      if (options.scaling) continue;
      plans.push_back(
          {"layer/" + std::string(layer) + (backward ? "/backward" : "/forward"),
           [=](CaseRun& run, const std::string& name) { time_training_layer(run, name, layer, backward); }});
    }
  }
  if (options.scaling || !gpu::is_hopper()) return plans;
  for (const std::int64_t texts : {1, 4, 64}) {
    for (const char* part : {"all", "in", "mixer", "out", "gate_up", "down", "head", "chain"}) {
      plans.push_back({"step/" + std::to_string(texts) + "/" + part,
                       [=](CaseRun& run, const std::string& name) { time_layers(run, name, part, texts); }});
    }
  }
  return plans;
}

}  // namespace

std::string error_json(double error) { return std::isfinite(error) ? text_of("%.2e", error) : "null"; }
std::string milliseconds(double ms) { return text_of("%.4f", ms); }

void CaseRun::write_result(const std::string& name, const std::string& fields, bool right,
                           const std::function<CallTimes()>& time) {
  std::string line = "{" + fields;
  if (right) {
    const CallTimes times = time();
    line += ", \"ms\": " + milliseconds(times.replay.median) + ", \"ms_least\": " + milliseconds(times.replay.least) +
            ", \"ms_p90\": " + milliseconds(times.replay.p90) + ", \"eager_ms\": " + milliseconds(times.eager.median);
  } else {
    line += ", \"wrong\": true";
    wrong += (wrong.empty() ? "" : "; ") + name;
  }
  write(line + ", \"repeats\": " + std::to_string(options.repeats) + ", \"gpu\": \"" + gpu + "\", \"commit\": \"" +
        options.commit + "\"}");
}

void time_gpu(const GpuOptions& options, const GpuWrite& write) {
  const std::vector<Plan> all = plans(options);
  CaseRun run{options, options.gpu, write, {}};
  bool any = false;
  for (const Plan& plan : all) {
    if (plan.name.find(options.filter) == std::string::npos) continue;
    any = true;
    plan.time(run, plan.name);
  }
  if (!any) {
    throw Error("bench op", "--filter", "'" + options.filter + "'",
                "a part of a name such as " + all.front().name + " or " + all.back().name);
  }
  if (!run.wrong.empty()) throw std::runtime_error("bench op: wrong, and so without a time: " + run.wrong);
}

}  // namespace efla::bench::cuda
