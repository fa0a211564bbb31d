// What each synthetic task promises, on many examples of several sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "efla/data/synthetic/task.h"
#include "tests/support/expect_error.h"

namespace efla::data::synthetic {
namespace {

using test::expect_error;
using Tokens = std::vector<std::int32_t>;

constexpr std::int64_t kExamples = 200;

// Calls check with this number of examples of both splits.
template <class Check>
void for_examples(const Task& task, Check&& check) {
  for (const Split split : {Split::train, Split::test}) {
    for (std::int64_t i = 0; i < kExamples; ++i) {
      SCOPED_TRACE(task.name + (split == Split::train ? ", train, example " : ", test, example ") + std::to_string(i));
      check(example(task, 1, split, i), split);
      if (testing::Test::HasFailure()) return;
    }
  }
}

// A standard task, and the largest that the papers use.
std::vector<Task> all_tasks() {
  std::vector<Task> tasks;
  for (const auto& kind : task_kinds()) tasks.push_back(make_task(kind.name));
  tasks.push_back(make_task("in-context-recall", {{"vocab", 128}, {"length", 1024}}));
  tasks.push_back(make_task("noisy-recall", {{"vocab", 144}, {"noise", 0.8}}));
  tasks.push_back(make_task("fuzzy-recall", {{"vocab", 128}, {"length", 19}}));
  tasks.push_back(make_task("memorisation", {{"vocab", 8192}}));
  tasks.push_back(make_task("compression", {{"vocab", 128}, {"length", 256}}));
  tasks.push_back(make_task("selective-copying", {{"copied", 96}}));
  tasks.push_back(make_task("mqar", {{"length", 256}, {"pairs", 64}}));
  tasks.push_back(make_task("stack", {{"length", 1024}, {"stacks", 3}}));
  return tasks;
}

TEST(SyntheticTasks, HaveTheSizesTheySay) {
  for (const auto& task : all_tasks()) {
    for_examples(task, [&](const Example& e, Split) {
      if (task.name == "mqar-set") {
        ASSERT_LE(static_cast<std::int64_t>(e.inputs.size()), task.length);
      } else {
        ASSERT_EQ(static_cast<std::int64_t>(e.inputs.size()), task.length);
      }
      ASSERT_EQ(e.targets.size(), e.inputs.size());
      std::int64_t asked = 0;
      for (std::size_t t = 0; t < e.inputs.size(); ++t) {
        ASSERT_TRUE(e.inputs[t] >= 0 && e.inputs[t] < task.vocab) << t << ": " << e.inputs[t];
        if (e.targets[t] == kIgnoreIndex) continue;
        ASSERT_TRUE(e.targets[t] >= 0 && e.targets[t] < task.vocab) << t << ": " << e.targets[t];
        EXPECT_FALSE(task.text(e.targets[t]).empty());
        ++asked;
      }
      if (task.name != "stack") {
        EXPECT_GT(asked, 0);
      }
    });
  }
}

TEST(SyntheticTasks, ExamplesDependOnSeedSplitAndIndexAlone) {
  for (const auto& task : all_tasks()) {
    SCOPED_TRACE(task.name);
    const auto third = example(task, 7, Split::train, 3);
    example(task, 7, Split::train, 2);
    EXPECT_EQ(example(make_task(task.name, task.parameters), 7, Split::train, 3).inputs, third.inputs);
    EXPECT_NE(example(task, 7, Split::train, 4).inputs, third.inputs);
    EXPECT_NE(example(task, 7, Split::test, 3).inputs, third.inputs);
    EXPECT_NE(example(task, 8, Split::train, 3).inputs, third.inputs);
  }
}

// Pairs, or noise, from the first token on; what is asked for is the value that the key had at its first sight.
void check_recall(const Task& task, std::int32_t first_value, std::int32_t first_noise) {
  std::int64_t noise = 0, slots = 0;
  for_examples(task, [&](const Example& e, Split split) {
    std::map<std::int32_t, std::int32_t> value_of;
    for (std::size_t t = 0; t < e.inputs.size(); t += 2) {
      const auto key = e.inputs[t];
      const bool last = t + 1 == e.inputs.size();
      ++slots;
      if (key >= first_noise) {
        ++noise;
        ASSERT_FALSE(last) << "the probe is noise";
        ASSERT_GE(e.inputs[t + 1], first_noise) << "half a slot is noise";
        if (split == Split::test) {
          EXPECT_EQ(e.targets[t], kIgnoreIndex);
        }
        continue;
      }
      ASSERT_LT(key, first_value) << "no key at " << t;
      const auto known = value_of.find(key);
      if (split == Split::train) {
        if (!last) {
          EXPECT_EQ(e.targets[t], e.inputs[t + 1]);
        }
      } else {
        EXPECT_EQ(e.targets[t], known == value_of.end() ? kIgnoreIndex : known->second);
      }
      if (last) {
        ASSERT_NE(known, value_of.end()) << "the probe was never seen";
        EXPECT_EQ(e.targets[t], known->second);
        continue;
      }
      const auto value = e.inputs[t + 1];
      ASSERT_TRUE(value >= first_value && value < first_noise) << "no value at " << t + 1;
      if (known != value_of.end()) {
        EXPECT_EQ(value, known->second);
      }
      value_of[key] = value;
    }
    for (std::size_t t = 1; t < e.inputs.size(); t += 2) {
      EXPECT_EQ(e.targets[t], split == Split::train ? e.inputs[t + 1] : kIgnoreIndex);
    }
  });
  const auto found = task.parameters.find("noise");
  const double asked = found == task.parameters.end() ? 0.0 : found->second;
  // Two slots of each example are never noise.
  const double pairs = static_cast<double>(slots) - 4.0 * kExamples;
  EXPECT_NEAR(static_cast<double>(noise) / pairs, asked, 0.02);
}

TEST(SyntheticTasks, RecallAsksForTheValueOfAKeySeenBefore) {
  check_recall(make_task("in-context-recall"), 8, 16);
  check_recall(make_task("in-context-recall", {{"vocab", 128}, {"length", 512}}), 64, 128);
  for (const double noise : {0.0, 0.2, 0.8}) check_recall(make_task("noisy-recall", {{"noise", noise}}), 8, 16);
}

TEST(SyntheticTasks, FuzzyRecallAsksForTheValueOfTheSameMotif) {
  for (const double length : {19, 40, 128}) {
    const auto task = make_task("fuzzy-recall", {{"length", length}});
    constexpr std::int32_t kFirstValue = 7, kPad = 15;
    for_examples(task, [&](const Example& e, Split split) {
      Tokens tokens = e.inputs, asked(e.inputs.size() + 1, kIgnoreIndex);
      tokens.push_back(e.targets.back());
      std::copy(e.targets.begin(), e.targets.end(), asked.begin() + 1);
      std::map<Tokens, Tokens> value_of;
      std::size_t t = 0;
      while (t < tokens.size() && tokens[t] == kPad) ++t;
      ASSERT_GT(t, 0U);
      bool last_known = false;
      while (t < tokens.size()) {
        Tokens key, value, asked_value;
        for (; t < tokens.size() && tokens[t] < kFirstValue; ++t) key.push_back(tokens[t]);
        for (; t < tokens.size() && tokens[t] >= kFirstValue; ++t) {
          ASSERT_LT(tokens[t], kPad);
          value.push_back(tokens[t]);
          asked_value.push_back(asked[t]);
        }
        for (const auto& motif : {key, value}) {
          ASSERT_TRUE(!motif.empty() && motif.size() <= 3U);
          EXPECT_EQ(std::set<std::int32_t>(motif.begin(), motif.end()).size(), motif.size());
        }
        if (split == Split::test) {
          EXPECT_EQ(key.size(), 3U);
        }
        const auto known = value_of.find(key);
        last_known = known != value_of.end();
        if (last_known) {
          EXPECT_EQ(value, known->second);
        }
        if (split == Split::test) {
          EXPECT_EQ(asked_value, last_known ? value : Tokens(value.size(), kIgnoreIndex));
        }
        value_of[key] = value;
      }
      EXPECT_TRUE(last_known) << "the probe was never seen";
      if (split == Split::train) {
        EXPECT_TRUE(std::equal(e.targets.begin(), e.targets.end(), tokens.begin() + 1));
      }
    });
  }
}

TEST(SyntheticTasks, MemorisationHasOneMapForAll) {
  const auto task = make_task("memorisation"), other = make_task("memorisation");
  std::map<std::int32_t, std::int32_t> value_of;
  std::set<std::int32_t> values;
  const auto check = [&](const Example& e, Split) {
    for (std::size_t t = 0; t < e.inputs.size(); t += 2) {
      EXPECT_LT(e.inputs[t], 127);
      EXPECT_EQ(e.targets[t], kIgnoreIndex);
      EXPECT_EQ(e.inputs[t + 1], 255);
      EXPECT_TRUE(e.targets[t + 1] >= 127 && e.targets[t + 1] < 255);
      const auto [known, fresh] = value_of.emplace(e.inputs[t], e.targets[t + 1]);
      EXPECT_EQ(known->second, e.targets[t + 1]);
      if (fresh) {
        EXPECT_TRUE(values.insert(e.targets[t + 1]).second) << "two keys have one value";
      }
    }
  };
  for_examples(task, check);
  for_examples(other, check);
  EXPECT_EQ(value_of.size(), 127U);
}

TEST(SyntheticTasks, CompressionAsksForEveryToken) {
  const auto task = make_task("compression");
  EXPECT_TRUE(task.reconstructs);
  for_examples(task, [&](const Example& e, Split) {
    EXPECT_EQ(e.targets, e.inputs);
    EXPECT_EQ(e.inputs.back(), 15);
    EXPECT_EQ(std::count(e.inputs.begin(), e.inputs.end(), 15), 1);
  });
}

TEST(SyntheticTasks, SelectiveCopyingAsksForTheTokensWithoutTheBlanks) {
  for (const double copied : {1, 16, 96, 127}) {
    const auto task = make_task("selective-copying", {{"copied", copied}});
    constexpr std::int32_t kCopy = 15, kBlank = 14;
    for_examples(task, [&](const Example& e, Split) {
      const auto copy = std::find(e.inputs.begin(), e.inputs.end(), kCopy);
      ASSERT_EQ(e.inputs.end() - copy, static_cast<std::int64_t>(copied) + 1);
      EXPECT_NE(*(copy - 1), kBlank);
      Tokens content;
      std::copy_if(e.inputs.begin(), copy, std::back_inserter(content), [&](auto token) { return token != kBlank; });
      ASSERT_EQ(content.size(), copied);
      EXPECT_TRUE(std::all_of(copy + 1, e.inputs.end(), [&](auto token) { return token == kBlank; }));
      EXPECT_TRUE(std::equal(content.begin(), content.end(), e.targets.end() - static_cast<std::int64_t>(copied)));
      EXPECT_EQ(std::count(e.targets.begin(), e.targets.end(), kIgnoreIndex), 256 - static_cast<std::int64_t>(copied));
    });
  }
}

TEST(SyntheticTasks, MqarLabelsAreTheValuesBoundToTheKeys) {
  double early = 0, queries = 0;
  for (const auto& [length, pairs] : {std::pair{64, 4}, {64, 16}, {256, 64}, {512, 32}}) {
    const auto task = make_task("mqar", {{"length", length}, {"pairs", pairs}, {"vocab", 200}});
    for_examples(task, [&](const Example& e, Split) {
      std::map<std::int32_t, std::int32_t> value_of;
      for (int i = 0; i < pairs; ++i) {
        EXPECT_TRUE(e.inputs[2 * i] >= 1 && e.inputs[2 * i] < 100);
        EXPECT_TRUE(e.inputs[2 * i + 1] >= 100 && e.inputs[2 * i + 1] < 200);
        value_of[e.inputs[2 * i]] = e.inputs[2 * i + 1];
      }
      ASSERT_EQ(value_of.size(), static_cast<std::size_t>(pairs)) << "a key twice";
      std::set<std::int32_t> asked, values;
      for (const auto& [key, value] : value_of) values.insert(value);
      EXPECT_EQ(values.size(), value_of.size()) << "a value twice";
      for (int t = 0; t < length; ++t) {
        if (e.targets[t] == kIgnoreIndex) continue;
        EXPECT_TRUE(t >= 2 * pairs && t % 2 == 0);
        ASSERT_TRUE(value_of.contains(e.inputs[t]));
        EXPECT_EQ(e.targets[t], value_of[e.inputs[t]]);
        asked.insert(e.inputs[t]);
        if (pairs == 32 && length == 512) {
          early += t < 2 * pairs + (length - 2 * pairs) / 2;
          ++queries;
        }
      }
      EXPECT_EQ(asked.size(), value_of.size()) << "each key is asked for once";
    });
  }
  EXPECT_GT(early / queries, 0.8);  // half would be uniform
}

TEST(SyntheticTasks, MqarsStandardSetHasItsFiveSizes) {
  const auto task = make_task("mqar-set");
  std::map<std::pair<std::size_t, std::ptrdiff_t>, int> count;
  constexpr int kDraws = 9000;
  for (int i = 0; i < kDraws; ++i) {
    const auto e = example(task, 3, Split::train, i);
    ++count[{e.inputs.size(),
             std::count_if(e.targets.begin(), e.targets.end(), [](auto t) { return t != kIgnoreIndex; })}];
  }
  ASSERT_EQ(count.size(), 5U);
  EXPECT_NEAR((count[{64, 4}]), 5000, 250);
  for (const auto& size : {std::pair{128, 8}, {256, 16}, {256, 32}, {256, 64}}) {
    EXPECT_NEAR(count[size], 1000, 150) << size.first << " " << size.second;
  }
}

TEST(SyntheticTasks, MqarSlotsFollowTheirWeights) {
  // With one pair the slot is i with probability ∝ i^(0.01 − 1).
  const auto task = make_task("mqar", {{"length", 64}, {"pairs", 1}});
  std::vector<double> count(31, 0.0);
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) {
    const auto e = example(task, 3, Split::train, i);
    const auto at = std::find_if(e.targets.begin(), e.targets.end(), [](auto t) { return t != kIgnoreIndex; });
    ++count[(at - e.targets.begin() - 2) / 2];
  }
  double sum = 0.0;
  for (int i = 1; i <= 31; ++i) sum += std::pow(i, -0.99);
  for (int i = 1; i <= 31; ++i) {
    const double expected = kDraws * std::pow(i, -0.99) / sum;
    EXPECT_NEAR(count[i - 1], expected, 5 * std::sqrt(expected)) << "slot " << i;
  }
}

TEST(SyntheticTasks, PalindromeAsksForTheReverse) {
  for (const double length : {4, 64, 200}) {
    const auto task = make_task("palindrome", {{"length", length}});
    for_examples(task, [&](const Example& e, Split) {
      const auto half = static_cast<std::ptrdiff_t>(length) / 2;
      ASSERT_EQ(e.inputs[half], 64);
      Tokens answer(e.inputs.begin() + half + 1, e.inputs.end());
      answer.push_back(e.targets.back());
      EXPECT_TRUE(std::equal(answer.begin(), answer.end(), std::make_reverse_iterator(e.inputs.begin() + half)));
      for (std::ptrdiff_t t = 0; t + 1 < 2 * half; ++t) {
        EXPECT_EQ(e.targets[t], t <= half ? kIgnoreIndex : e.inputs[t + 1]);
      }
    });
  }
}

TEST(SyntheticTasks, PopReturnsWhatWasPushedLast) {
  for (const double stacks : {1, 3, 64}) {
    const auto task = make_task("stack", {{"stacks", stacks}, {"length", 301}});
    const auto first_element = 2 + static_cast<std::int32_t>(stacks);
    std::int64_t pops = 0, operations = 0;
    for_examples(task, [&](const Example& e, Split) {
      std::map<std::int32_t, Tokens> content;
      for (std::size_t t = 0; t + 1 < e.inputs.size(); t += 3) {
        const auto operation = e.inputs[t], stack = e.inputs[t + 1];
        const bool whole = t + 2 < e.inputs.size();
        ASSERT_TRUE(operation == 0 || operation == 1);
        ASSERT_TRUE(stack >= 2 && stack < first_element);
        EXPECT_EQ(e.targets[t], kIgnoreIndex);
        if (whole) {
          EXPECT_GE(e.inputs[t + 2], first_element);
          EXPECT_EQ(e.targets[t + 2], kIgnoreIndex);
        }
        ++operations;
        if (operation == 0) {
          EXPECT_EQ(e.targets[t + 1], kIgnoreIndex);
          if (whole) content[stack].push_back(e.inputs[t + 2]);
          continue;
        }
        ++pops;
        ASSERT_FALSE(content[stack].empty()) << "a POP of an empty stack";
        EXPECT_EQ(e.targets[t + 1], content[stack].back());
        if (whole) {
          EXPECT_EQ(e.inputs[t + 2], content[stack].back());
        }
        content[stack].pop_back();
      }
    });
    EXPECT_NEAR(static_cast<double>(pops) / static_cast<double>(operations), 0.46, 0.06);
  }
}

TEST(SyntheticTasks, CountsModuloANumber) {
  for (const int modulus : {2, 5}) {
    const auto task = modulus == 2 ? make_task("parity") : make_task("modular-counting");
    EXPECT_EQ(task.vocab, modulus);
    for_examples(task, [&](const Example& e, Split) {
      std::int32_t ones = 0;
      for (std::size_t t = 0; t < e.inputs.size(); ++t) {
        ASSERT_LE(e.inputs[t], 1);
        ones += e.inputs[t];
        EXPECT_EQ(e.targets[t], ones % modulus);
      }
    });
  }
}

TEST(SyntheticTasks, PermutationsCompose) {
  for (const std::string name : {"s3", "s5"}) {
    const auto task = make_task(name);
    EXPECT_EQ(task.vocab, name == "s3" ? 6 : 120);
    EXPECT_EQ(task.text(0), name == "s3" ? "123" : "12345");
    std::set<std::string> elements;
    for (std::int32_t i = 0; i < task.vocab; ++i) elements.insert(task.text(i));
    EXPECT_EQ(static_cast<std::int64_t>(elements.size()), task.vocab);
    for_examples(task, [&](const Example& e, Split) {
      std::string things = task.text(0), moved = things;  // moved[i]: where thing i is now
      for (std::size_t t = 0; t < e.inputs.size(); ++t) {
        const auto p = task.text(e.inputs[t]);
        for (auto& place : moved) place = p[place - '1'];
        EXPECT_EQ(task.text(e.targets[t]), moved);
      }
    });
  }
}

TEST(SyntheticTasks, RefuseSizesThatTheyCannotHold) {
  const auto refuses = [](const char* name, const Parameters& parameters, const char* argument, const char* says) {
    SCOPED_TRACE(name);
    expect_error([&] { make_task(name, parameters); }, argument, says);
  };
  refuses("mqar", {{"length", 64}, {"pairs", 17}}, "pairs", "got 68 > 64, expected 4 pairs <= length");
  refuses("mqar", {{"vocab", 8}, {"pairs", 4}}, "vocab", "pairs <= vocab / 2 - 1");
  refuses("mqar-set", {{"length", 96}}, "length", "a multiple of 64");
  refuses("mqar-set", {{"vocab", 64}}, "vocab", "length / 4 pairs <= vocab / 2 - 1");
  refuses("stack", {{"vocab", 67}}, "stacks", "got 68 > 67, expected PUSH + POP + stacks + two elements <= vocab");
  refuses("noisy-recall", {{"vocab", 17}}, "vocab", "16 tokens of noise");
  refuses("noisy-recall", {{"noise", 1.0}}, "noise", "noise < 1");
  refuses("fuzzy-recall", {{"vocab", 6}}, "vocab", "<= (vocab - 1) / 2");
  refuses("fuzzy-recall", {{"length", 18}}, "length", "<= length");
  refuses("selective-copying", {{"copied", 128}}, "copied", "got 258 > 256, expected 2 copied + 2 <= length");
  refuses("palindrome", {{"length", 63}}, "length", "even");
  refuses("memorisation", {{"vocab", 2}}, "vocab", "from 3");
  refuses("compression", {{"length", 1.5}}, "length", "whole number");
  refuses("parity", {{"length", 0}}, "length", "from 1");
  refuses("parity", {{"lenght", 10}}, "lenght", "a parameter: length");
  refuses("parrot", {}, "name", "one of in-context-recall, ");
}

}  // namespace
}  // namespace efla::data::synthetic
