#include "efla/rule/step_size.h"

#include <charconv>

#include "efla/base/error.h"
#include "efla/base/text.h"

namespace efla {

StepSize parse_step_size(std::string_view name) {
  if (name == "euler") return {Integrator::euler};
  if (name == "exact") return {Integrator::exact};
  if (name == "implicit_euler") return {Integrator::implicit_euler};
  if (name == "trapezoid") return {Integrator::trapezoid};
  if (name.starts_with("rk")) {
    int order = 0;
    const char* end = name.data() + name.size();
    const auto [stop, status] = std::from_chars(name.data() + 2, end, order);
    if (status == std::errc() && stop == end) {
      if (order >= 1 && order <= kMaxRungeKuttaOrder) return {Integrator::rk, order};
      throw Error("step size", "order of rk", std::to_string(order), "1 to " + std::to_string(kMaxRungeKuttaOrder));
    }
  }
  const std::vector<std::string> names{"euler", "rk2", "rk4", "exact", "implicit_euler", "trapezoid"};
  throw Error("step size", "step", "'" + std::string(name) + "'",
              "euler, rkN, exact, implicit_euler or trapezoid (nearest: " + nearest_name(name, names) + ")");
}

std::string name_of(const StepSize& step) {
  switch (step.integrator) {
    case Integrator::euler:
      return "euler";
    case Integrator::rk:
      return "rk" + std::to_string(step.order);
    case Integrator::exact:
      return "exact";
    case Integrator::implicit_euler:
      return "implicit_euler";
    case Integrator::trapezoid:
      return "trapezoid";
  }
  return {};
}

}  // namespace efla
