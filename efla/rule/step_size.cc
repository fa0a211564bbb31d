#include "efla/rule/step_size.h"

#include <charconv>
#include <utility>
#include <vector>

#include "efla/base/error.h"
#include "efla/base/text.h"

namespace efla {
namespace {

constexpr std::pair<Integrator, const char*> kNames[]{{Integrator::euler, "euler"},
                                                      {Integrator::rk, "rkN"},
                                                      {Integrator::exact, "exact"},
                                                      {Integrator::implicit_euler, "implicit_euler"},
                                                      {Integrator::trapezoid, "trapezoid"}};

[[noreturn]] void throw_unknown(std::string_view got) {
  std::vector<std::string> candidates{"rk2", "rk4"};
  std::string list;
  for (const auto& [integrator, name] : kNames) {
    if (integrator != Integrator::rk) candidates.emplace_back(name);
    list += (list.empty() ? "" : ", ") + std::string(name);
  }
  throw Error("step size", "step", "'" + std::string(got) + "'",
              "one of " + list + " (nearest: " + nearest_name(got, candidates) + ")");
}

}  // namespace

StepSize parse_step_size(std::string_view step) {
  for (const auto& [integrator, name] : kNames) {
    if (step == name && integrator != Integrator::rk) return {integrator};
  }
  if (step.starts_with("rk")) {
    int order = 0;
    const char* end = step.data() + step.size();
    const auto [stop, status] = std::from_chars(step.data() + 2, end, order);
    if (status == std::errc() && stop == end) {
      if (order >= 1 && order <= kMaxRungeKuttaOrder) return {Integrator::rk, order};
      throw Error("step size", "step", "'" + std::string(step) + "'",
                  "rk1 to rk" + std::to_string(kMaxRungeKuttaOrder));
    }
  }
  throw_unknown(step);
}

std::string name_of(const StepSize& step) {
  if (step.integrator == Integrator::rk) return "rk" + std::to_string(step.order);
  for (const auto& [integrator, name] : kNames) {
    if (step.integrator == integrator) return name;
  }
  return {};
}

}  // namespace efla
