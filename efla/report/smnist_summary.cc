#include "efla/report/smnist_summary.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "efla/report/html.h"

namespace efla::report {
namespace {

constexpr double kChance = 0.15;

using Verdict = Comparison::Verdict;

Verdict verdict_of(const Spread& a, const Spread& b) {
  if (a.mean < kChance && b.mean < kChance) return Verdict::chance;
  const double difference = a.mean - b.mean;
  const double spread = std::isfinite(a.std) && std::isfinite(b.std) ? a.std + b.std : 0;
  if (!(std::abs(difference) > spread)) return Verdict::even;
  return difference > 0 ? Verdict::ahead : Verdict::behind;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string out;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out += parts.size() == 2 ? " and " : i + 1 == parts.size() ? ", and " : ", ";
    out += parts[i];
  }
  return out;
}

std::string count_of(int n, const std::string& noun) {
  static constexpr std::array words{"no", "one", "two", "three", "four", "five", "six"};
  const auto index = static_cast<std::size_t>(n);
  return (index < words.size() ? words[index] : std::to_string(n)) + " " + noun + (n == 1 ? "" : "s");
}

// "96.5 ± 0.2 % against 96.7 ± 0.1 %"
std::string against(const Spread& a, const Spread& b) { return percent(a) + " against " + percent(b); }

std::string clause(const Comparison& c, bool with_figures) {
  const auto gap = fixed(100 * std::abs(c.a.mean - c.b.mean), 1) + " points";
  std::string text;
  switch (c.verdict) {
    case Verdict::ahead:
      text = "ahead by " + gap;
      break;
    case Verdict::behind:
      text = "behind by " + gap;
      break;
    case Verdict::even:
      text = "not clearly apart from it";
      break;
    case Verdict::chance:
      text = "down to guessing, as deltanet is,";
      break;
  }
  text += " under " + at_level(c.perturbation, c.level);
  return with_figures ? text + " (" + against(c.a, c.b) + ")" : text;
}

std::vector<Comparison> comparisons(const Pair& pair) {
  std::vector<Comparison> all;
  for (std::size_t i = 0; i < kPerturbations.size(); ++i) {
    if (const auto c = compare(pair.a, pair.b, i)) all.push_back(*c);
  }
  return all;
}

std::string clauses(const std::vector<Comparison>& all, bool with_figures) {
  std::vector<std::string> parts;
  for (const auto& c : all) parts.push_back(clause(c, with_figures));
  return joined(parts);
}

std::string short_name(std::size_t perturbation) {
  static constexpr std::array names{"dropout", "scale", "noise"};
  return names[perturbation];
}

std::string on_the_means(const std::vector<Comparison>& all) {
  std::vector<std::string> parts;
  for (const auto& c : all) parts.push_back(points(c.mean_difference) + " for " + short_name(c.perturbation));
  return "Over all levels the mean difference in points is " + joined(parts) + ".";
}

// The paper has efla ahead in every test.
std::string on_the_claim(const std::vector<Comparison>& all) {
  std::vector<std::string> held, failed;
  for (const auto& c : all) {
    (c.verdict == Verdict::ahead ? held : failed).push_back(short_name(c.perturbation));
  }
  const std::string claim = "Figure 1 of the paper shows efla ahead of deltanet in every test; ";
  if (failed.empty()) return claim + "these figures agree.";
  if (held.empty()) return claim + "these figures do not bear that out in any.";
  return claim + "these figures bear that out for " + joined(held) + ", and not for " + joined(failed) + ".";
}

std::string on_clean_images(const Study& study) {
  std::vector<std::string> parts;
  bool same = true, spread = false;
  for (const auto& group : study.headline) {
    if (group.clean.count == 0) continue;
    parts.push_back(group.mixer + " " + percent(group.clean));
    same = same && setting(group) == setting(study.headline.front());
    spread = spread || std::isfinite(group.clean.std);
  }
  if (parts.empty()) return "";
  std::string how = same ? setting(study.headline.front()) : "each in the configuration of the table below";
  if (spread) how += "; mean ± standard deviation over seeds";
  return "Accuracy on clean test images: " + joined(parts) + " (" + how + ").";
}

const Point* at(const Line& line, double x) {
  const auto it = std::find_if(line.begin(), line.end(), [&](const Point& p) { return p.x == x; });
  return it == line.end() ? nullptr : &*it;
}

// The mixer that leads at the strongest level that all were measured at, test by test.
std::string on_the_leaders(const Study& study) {
  std::vector<std::string> parts;
  for (std::size_t i = 0; i < kPerturbations.size(); ++i) {
    const auto& first = study.headline.front().perturbed[i];
    for (auto level = first.rbegin(); level != first.rend(); ++level) {
      const auto measured = [&](const Group& group) { return at(group.perturbed[i], level->x) != nullptr; };
      if (!std::all_of(study.headline.begin(), study.headline.end(), measured)) continue;
      const auto best =
          std::max_element(study.headline.begin(), study.headline.end(), [&](const auto& a, const auto& b) {
            return at(a.perturbed[i], level->x)->y.mean < at(b.perturbed[i], level->x)->y.mean;
          });
      parts.push_back(best->mixer + " under " + at_level(i, level->x) + " (" +
                      percent(at(best->perturbed[i], level->x)->y) + ")");
      break;
    }
  }
  return parts.empty() ? ""
                       : "Highest of all " + std::to_string(study.headline.size()) + " mixers: " + joined(parts) + ".";
}

const Group* find(const std::vector<Group>& groups, const std::string& mixer) {
  const auto it = std::find_if(groups.begin(), groups.end(), [&](const Group& group) { return group.mixer == mixer; });
  return it == groups.end() ? nullptr : &*it;
}

}  // namespace

std::optional<Comparison> compare(const Group& a, const Group& b, std::size_t perturbation) {
  const Point *strongest_a = nullptr, *strongest_b = nullptr;
  double sum = 0;
  int common = 0;
  for (const auto& p : a.perturbed[perturbation]) {
    for (const auto& q : b.perturbed[perturbation]) {
      if (p.x != q.x) continue;
      strongest_a = &p;
      strongest_b = &q;
      sum += p.y.mean - q.y.mean;
      ++common;
    }
  }
  if (common == 0) return std::nullopt;
  const auto &ya = strongest_a->y, &yb = strongest_b->y;
  return Comparison{perturbation, strongest_a->x, ya, yb, sum / common, verdict_of(ya, yb)};
}

std::vector<Pair> efla_against_deltanet(const Study& study) {
  const auto *efla = find(study.headline, "efla"), *deltanet = find(study.headline, "deltanet");
  if (!efla || !deltanet) return {};
  std::vector<Pair> pairs{{*efla, *deltanet}};
  for (const auto& a : study.groups) {
    if (a.mixer != "efla" || a.layers == efla->layers || a.lr != efla->lr) continue;
    for (const auto& b : study.groups) {
      if (b.mixer == "deltanet" && b.layers == a.layers && b.lr == deltanet->lr) pairs.push_back({a, b});
    }
  }
  return pairs;
}

std::string percent(const Spread& spread) {
  if (!std::isfinite(spread.std)) return percent(spread.mean);
  return fixed(100 * spread.mean, 1) + " ± " + percent(spread.std);
}

std::string points(double difference) {
  const auto text = fixed(100 * difference, 1);
  return difference > 0 && text != "0.0" ? "+" + text : text;
}

std::string setting(const Group& group) {
  std::vector<std::string> parts;
  if (group.layers > 0) parts.push_back(count_of(group.layers, "layer"));
  if (group.lr > 0) parts.push_back("learning rate " + compact(group.lr));
  if (!group.seeds.empty()) parts.push_back(count_of(static_cast<int>(group.seeds.size()), "seed"));
  std::string out;
  for (const auto& part : parts) out += (out.empty() ? "" : ", ") + part;
  return out;
}

std::string at_level(std::size_t perturbation, double level) {
  switch (perturbation) {
    case 0:
      return "pixel dropout of " + percent(level);
    case 1:
      return "an intensity factor of " + compact(level);
    default:
      return "noise of σ = " + compact(level);
  }
}

std::string summary(const Study& study) {
  std::vector<std::string> sentences{on_clean_images(study)};
  const auto pairs = efla_against_deltanet(study);
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const auto all = comparisons(pairs[i]);
    if (all.empty()) continue;
    if (i == 0) {
      sentences.push_back("At the strongest level of each test, and against deltanet, efla is " + clauses(all, true) + ".");
      sentences.push_back(on_the_means(all));
      if (pairs[i].a.seeds.size() < 2 || pairs[i].b.seeds.size() < 2) {
        sentences.push_back("With one seed there is no spread to judge these differences by.");
      }
      sentences.push_back(on_the_claim(all));
    } else {
      sentences.push_back("With " + count_of(pairs[i].a.layers, "layer") + ", efla is " + clauses(all, false) + ".");
    }
  }
  if (study.headline.size() > 2 || (pairs.empty() && study.headline.size() == 2))
    sentences.push_back(on_the_leaders(study));
  std::string out;
  for (const auto& sentence : sentences) {
    if (!sentence.empty()) out += (out.empty() ? "" : " ") + sentence;
  }
  return out;
}

}  // namespace efla::report
