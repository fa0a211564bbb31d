#include "efla/report/smnist_summary.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "efla/report/html.h"

namespace efla::report {
namespace {

constexpr double kChance = 0.15;

using Verdict = Comparison::Verdict;

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

// "96.5 ± 0.2 against 96.7 ± 0.1 %"
std::string against(const Spread& a, const Spread& b) { return in_percent(a) + " against " + percent(b); }

// "ahead by 3.7 points under dropout of p = 0.8 (28.3 ± 1.7 against 24.6 ± 1.4 %)"
std::string at_the_strongest(const Comparison& c) {
  const auto& [a, b] = c.strongest;
  const auto gap = fixed(100 * std::abs(a.mean - b.mean), 1) + " points";
  std::string text;
  switch (c.strongest.verdict()) {
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
  return text + " under " + at_level(c.perturbation, c.strongest_level) + " (" + against(a, b) + ")";
}

// "−2.0 for dropout (within the spread)"
std::string in_the_mean(const Comparison& c) {
  const auto& [a, b] = c.mean;
  const auto text = points(a.mean - b.mean) + " for " + kPerturbations[c.perturbation].key;
  switch (c.mean.verdict()) {
    case Verdict::even:
      return text + " (within the spread)";
    case Verdict::chance:
      return text + " (both guess)";
    default:
      return text;
  }
}

std::vector<Comparison> comparisons(const Pair& pair) {
  std::vector<Comparison> all;
  for (std::size_t i = 0; i < kPerturbations.size(); ++i) {
    if (const auto c = compare(pair.a, pair.b, i)) all.push_back(*c);
  }
  return all;
}

template <class F>
std::string each(const std::vector<Comparison>& all, F words) {
  std::vector<std::string> parts;
  for (const auto& c : all) parts.push_back(words(c));
  return joined(parts);
}

// What these figures do with the claim that efla is ahead in every test: "bear that out for scale, and not for noise".
std::string on_the_claim(const std::vector<Comparison>& all) {
  std::vector<std::string> held, strongest, mean, failed;
  for (const auto& c : all) {
    const bool at_strongest = c.strongest.verdict() == Verdict::ahead, in_mean = c.mean.verdict() == Verdict::ahead;
    auto& list = at_strongest && in_mean ? held : at_strongest ? strongest : in_mean ? mean : failed;
    list.push_back(kPerturbations[c.perturbation].key);
  }
  if (held.size() == all.size()) return "agree";
  if (failed.size() == all.size()) return "do not bear that out in any";
  std::string text;
  const auto add = [&](const std::string& how, const std::vector<std::string>& tests) {
    if (!tests.empty()) text += (text.empty() ? "bear that out " : ", and ") + how + joined(tests);
  };
  add("for ", held);
  add("only at the strongest level for ", strongest);
  add("only in the mean over the levels for ", mean);
  add("not for ", failed);
  return text;
}

std::string on_clean_images(const Study& study) {
  std::vector<std::string> parts;
  bool spread = false;
  for (const auto& group : study.headline) {
    if (group.clean.count == 0 || !std::isfinite(group.clean.mean)) continue;
    parts.push_back(group.mixer + " " + percent(group.clean));
    spread = spread || std::isfinite(group.clean.std);
  }
  if (parts.empty()) return "";
  return "On clean test images the accuracy is " + joined(parts) + " (" + headline_setting(study) +
         (spread ? "; mean ± standard deviation over seeds)." : ").");
}

const Point* at(const Line& line, double x) {
  const auto it = std::find_if(line.begin(), line.end(), [&](const Point& p) { return p.x == x; });
  return it == line.end() ? nullptr : &*it;
}

// The accuracy in the mean over these levels, all of which the group was measured at.
Spread over_levels(const Group& group, std::size_t perturbation, const std::vector<double>& levels) {
  const auto count = static_cast<double>(levels.size());
  std::vector<double> runs;
  for (const auto& accuracies : group.perturbed_runs[perturbation]) {
    if (!std::all_of(levels.begin(), levels.end(), [&](double x) { return accuracies.contains(x); })) continue;
    double sum = 0;
    for (const double x : levels) sum += accuracies.at(x);
    runs.push_back(sum / count);
  }
  if (!runs.empty()) return spread_of(runs);
  Spread mean{0, 0, NAN, NAN, 0};
  for (const double x : levels) {
    const auto& y = at(group.perturbed[perturbation], x)->y;
    mean.mean += y.mean / count;
    mean.std += y.std / count;
    mean.count = y.count;
  }
  return mean;
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
                       : "Highest of all " + count_of(static_cast<int>(study.headline.size()), "mixer") + ": " +
                             joined(parts) + ".";
}

const Group* find(const std::vector<Group>& groups, const std::string& mixer) {
  const auto it = std::find_if(groups.begin(), groups.end(), [&](const Group& group) { return group.mixer == mixer; });
  return it == groups.end() ? nullptr : &*it;
}

}  // namespace

Verdict Comparison::Sides::verdict() const {
  if (a.mean < kChance && b.mean < kChance) return Verdict::chance;
  const double difference = a.mean - b.mean;
  const double spread = std::isfinite(a.std) && std::isfinite(b.std) ? a.std + b.std : 0;
  if (!(std::abs(difference) > spread)) return Verdict::even;
  return difference > 0 ? Verdict::ahead : Verdict::behind;
}

std::optional<Comparison> compare(const Group& a, const Group& b, std::size_t perturbation) {
  std::vector<double> levels;
  for (const auto& p : a.perturbed[perturbation]) {
    if (at(b.perturbed[perturbation], p.x)) levels.push_back(p.x);
  }
  if (levels.empty()) return std::nullopt;
  const auto strongest = [&](const Group& group) { return at(group.perturbed[perturbation], levels.back())->y; };
  const auto mean = [&](const Group& group) { return over_levels(group, perturbation, levels); };
  return Comparison{
      perturbation, levels.back(), static_cast<int>(levels.size()), {strongest(a), strongest(b)}, {mean(a), mean(b)}};
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

std::string in_percent(const Spread& spread) {
  const auto mean = fixed(100 * spread.mean, 1);
  return std::isfinite(spread.std) ? mean + "\u00a0±\u00a0" + fixed(100 * spread.std, 1) : mean;
}

std::string percent(const Spread& spread) { return in_percent(spread) + "\u00a0%"; }

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

std::string headline_setting(const Study& study) {
  std::vector<std::string> settings;
  for (const auto& group : study.headline) settings.push_back(setting(group));
  if (settings.empty()) return "";
  if (std::all_of(settings.begin(), settings.end(), [&](const auto& s) { return s == settings.front(); })) {
    return settings.front();
  }
  std::string out;
  for (std::size_t i = 0; i < settings.size(); ++i) {
    out += (i > 0 ? "; " : "") + study.headline[i].mixer + ": " + settings[i];
  }
  return out;
}

std::string at_level(std::size_t perturbation, double level) {
  switch (perturbation) {
    case 0:
      return "dropout of p\u00a0=\u00a0" + compact(level);
    case 1:
      return "an intensity factor of\u00a0" + compact(level);
    default:
      return "noise of σ\u00a0=\u00a0" + compact(level);
  }
}

std::string summary(const Study& study) {
  std::vector<std::string> sentences;
  const auto pairs = efla_against_deltanet(study);
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const auto all = comparisons(pairs[i]);
    if (all.empty()) continue;
    const auto claim = on_the_claim(all);
    if (i > 0) {
      sentences.push_back("With " + count_of(pairs[i].a.layers, "layer") + ", the figures " + claim + ".");
      continue;
    }
    sentences.push_back("Figure 1 of the paper shows efla ahead of deltanet in every test; these figures " + claim +
                        ".");
    sentences.push_back("At the strongest level of each test, and against deltanet, efla is " +
                        each(all, at_the_strongest) + ".");
    if (pairs[i].a.seeds.size() < 2 || pairs[i].b.seeds.size() < 2) {
      sentences.push_back("With one seed there is no spread to judge these differences by.");
    }
    sentences.push_back("In the mean over all levels the difference in points is " + each(all, in_the_mean) + ".");
  }
  if (study.headline.size() > 2 || (pairs.empty() && study.headline.size() == 2)) {
    sentences.push_back(on_the_leaders(study));
  }
  sentences.push_back(on_clean_images(study));
  std::string out;
  for (const auto& sentence : sentences) {
    if (!sentence.empty()) out += (out.empty() ? "" : " ") + sentence;
  }
  return out;
}

}  // namespace efla::report
