// Stop strings in a text that comes in pieces.
#include "efla/generate/stop_strings.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "efla/base/random.h"

namespace efla::generate {
namespace {

// What is passed on of a text that comes in these pieces, and whether it was stopped.
std::pair<std::string, bool> passed(const std::vector<std::string>& strings, const std::vector<std::string>& pieces) {
  StopStrings stop(strings);
  std::string text;
  for (const auto& piece : pieces) text += stop.push(piece);
  const bool stopped = stop.stopped();
  return {text + stop.finish(), stopped};
}

TEST(StopStrings, HoldsBackWhatMayBeginOne) {
  StopStrings stop({"END", "\n\n"});
  EXPECT_EQ(stop.push("one E"), "one ");
  EXPECT_EQ(stop.held(), "E");
  EXPECT_EQ(stop.push("N"), "");
  EXPECT_EQ(stop.push("E"), "EN");  // and the new E may begin one
  EXPECT_EQ(stop.push("ND more"), "");
  EXPECT_TRUE(stop.stopped());
  EXPECT_EQ(stop.push("more"), "");
  EXPECT_EQ(stop.finish(), "");
  EXPECT_EQ(passed({"END"}, {"it ends EN"}), std::pair(std::string("it ends EN"), false));
  EXPECT_EQ(passed({}, {"a", "b"}), std::pair(std::string("ab"), false));
}

TEST(StopStrings, TheOneCompleteFirstEndsTheText) {
  EXPECT_EQ(passed({"abcd", "c"}, {"xabcdy"}).first, "xab");
  EXPECT_EQ(passed({"bc", "abc"}, {"xabcd"}).first, "x");  // both end there: the longest
  EXPECT_EQ(passed({"aab"}, {"aaab"}).first, "a");
}

TEST(StopStrings, GoesOnFromWhatAnotherHeld) {
  StopStrings first({"STOP"});
  EXPECT_EQ(first.push("abcST"), "abc");
  StopStrings second({"STOP"}, first.held());
  EXPECT_EQ(second.push("OPdef"), "");
  EXPECT_TRUE(second.stopped());
}

TEST(StopStrings, PiecesDoNotChangeTheText) {
  Random random(3);
  const auto letters = [&](std::uint32_t longest) {
    std::string text(1 + random.below(longest), ' ');
    for (char& c : text) c = static_cast<char>('a' + random.below(2));
    return text;
  };
  int stopped = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const std::vector<std::string> strings{letters(5) + "b", letters(4) + "a"};
    const std::string text = letters(12);
    // The definition, byte by byte of the whole text.
    std::string expected = text;
    bool found = false;
    for (std::size_t end = 1; end <= text.size() && !found; ++end) {
      std::size_t longest = 0;
      for (const auto& string : strings) {
        if (text.substr(0, end).ends_with(string)) longest = std::max(longest, string.size());
      }
      found = longest > 0;
      if (found) expected = text.substr(0, end - longest);
    }
    std::vector<std::string> pieces;
    for (std::size_t at = 0; at < text.size(); at += pieces.back().size()) {
      pieces.push_back(text.substr(at, 1 + random.below(4)));
    }
    EXPECT_EQ(passed(strings, pieces), std::pair(expected, found)) << text << ": " << strings[0] << ' ' << strings[1];
    stopped += found;
  }
  EXPECT_GT(stopped, 500);
  EXPECT_LT(stopped, 1500);
}

}  // namespace
}  // namespace efla::generate
