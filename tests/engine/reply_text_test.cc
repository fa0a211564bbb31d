// The text of a reply up to a stop string, with and without special tokens.
#include "efla/engine/reply_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "efla/base/random.h"
#include "tests/support/special_tokens.h"

namespace efla::engine {
namespace {

using test::kTextEnd;
using test::kTurnEnd;
using test::kTurnStart;
using Ids = std::vector<std::int32_t>;

class ReplyTextTest : public testing::Test {
 protected:
  // Returns ids of a text. Texts of special tokens become these.
  Ids ids(const std::string& text) const { return tokenizer->encode(text); }

  // Returns the text that is certain after these ids.
  static std::string pushed(ReplyText& reply, const Ids& ids) {
    std::string text;
    for (const auto id : ids) text += reply.push(id);
    return text;
  }
  // Returns the text of a whole reply, and whether a stop string ended it.
  std::pair<std::string, bool> whole(const std::vector<std::string>& stops, const Ids& ids) const {
    ReplyText reply(*tokenizer, stops);
    std::string text = pushed(reply, ids);
    const bool stopped = reply.stopped();
    return {text + reply.finish(), stopped};
  }

  const std::unique_ptr<data::Tokenizer> tokenizer = test::tokenizer_with_special_tokens();
};

TEST_F(ReplyTextTest, HoldsBackWhatMayBeginAStopString) {
  ReplyText reply(*tokenizer, {"END", "\n\n"});
  EXPECT_EQ(pushed(reply, ids("one E")), "one ");
  EXPECT_EQ(reply.held(), "E");
  EXPECT_EQ(reply.push('N'), "");
  EXPECT_EQ(reply.begun(), 2U);
  EXPECT_EQ(reply.push('E'), "EN");  // and the new E may begin one
  EXPECT_EQ(pushed(reply, ids("ND more")), "");
  EXPECT_TRUE(reply.stopped());
  EXPECT_EQ(reply.stop(), "END");
  EXPECT_EQ(reply.push('m'), "");
  EXPECT_EQ(reply.finish(), "");
  EXPECT_EQ(whole({"END"}, ids("it ends EN")), std::pair(std::string("it ends EN"), false));
  EXPECT_EQ(whole({}, ids("ab")), std::pair(std::string("ab"), false));
}

TEST_F(ReplyTextTest, TheStopStringCompleteFirstEndsTheText) {
  EXPECT_EQ(whole({"abcd", "c"}, ids("xabcdy")).first, "xab");
  EXPECT_EQ(whole({"bc", "abc"}, ids("xabcd")).first, "x");  // both end there: the longest
  EXPECT_EQ(whole({"aab"}, ids("aaab")).first, "a");
}

TEST_F(ReplyTextTest, ContinuesWithWhatAnotherHeld) {
  ReplyText first(*tokenizer, {"STOP"});
  EXPECT_EQ(pushed(first, ids("abcST")), "abc");
  ReplyText second(*tokenizer, {"STOP"}, first.held());
  EXPECT_EQ(second.held(), "ST");
  EXPECT_EQ(pushed(second, ids("OPdef")), "");
  EXPECT_TRUE(second.stopped());
  ReplyText other(*tokenizer, {}, first.held());
  EXPECT_EQ(other.finish(), "ST");
  const Ids unfinished{0xC3};
  ReplyText third(*tokenizer, {}, "", unfinished);
  EXPECT_EQ(third.push(0xA9), "é");
}

TEST_F(ReplyTextTest, ASpecialTokenIsFoundByItsText) {
  const std::vector<std::string> exact{"<|im_end|>"}, contained{"b<|im_end|>\n"};
  EXPECT_EQ(whole(exact, {'a', kTurnEnd, 'b'}), std::pair(std::string("a"), true));
  EXPECT_EQ(whole(exact, {'a', kTurnStart, 'b'}), std::pair(std::string("ab"), false));
  EXPECT_EQ(whole({}, {'a', kTurnEnd, 'b'}), std::pair(std::string("ab"), false));
  EXPECT_EQ(whole(contained, {'a', 'b', kTurnEnd, '\n', 'c'}), std::pair(std::string("a"), true));
  EXPECT_EQ(whole(contained, {'a', 'b', '\n', kTurnEnd}), std::pair(std::string("ab\n"), false));
  EXPECT_EQ(whole(contained, {'a', 'b', kTurnEnd, 'c'}), std::pair(std::string("abc"), false));
  EXPECT_EQ(whole({"<|im_end|><|im_start|>"}, {'a', kTurnEnd, kTurnEnd, kTurnStart}),
            std::pair(std::string("a"), true));
  // A model may also spell the token.
  EXPECT_EQ(whole(exact, Ids{'a', '<', '|', 'i', 'm', '_', 'e', 'n', 'd', '|', '>', 'b'}),
            std::pair(std::string("a"), true));
}

TEST_F(ReplyTextTest, APartOfASpecialTokenStopsNothing) {
  for (const char* stop : {"<", "im_end", "|>", "a<", "|>b"}) {
    EXPECT_EQ(whole({stop}, {'a', kTurnEnd, 'b'}), std::pair(std::string("ab"), false)) << stop;
  }
}

TEST_F(ReplyTextTest, OtherStopStringsDoNotSeeSpecialTokens) {
  EXPECT_EQ(whole({"ab"}, {'x', 'a', kTurnStart, 'b'}), std::pair(std::string("x"), true));
  EXPECT_EQ(whole({"ab", "<|im_start|>c"}, {'x', 'a', kTurnStart, 'b'}), std::pair(std::string("x"), true));
  EXPECT_EQ(whole({"a<|im_end|>b"}, {'x', 'a', kTurnStart, kTurnEnd, 'b'}), std::pair(std::string("x"), true));
}

TEST_F(ReplyTextTest, AnUnfinishedCharacterBeforeASpecialTokenIsText) {
  EXPECT_EQ(whole({"<|im_end|>"}, {'a', 0xC3, kTurnEnd}), std::pair(std::string("a\uFFFD"), true));
  EXPECT_EQ(whole({"<|im_end|>x"}, {'a', 0xC3, kTurnEnd, 0xA9}), std::pair(std::string("aé"), false));
}

TEST_F(ReplyTextTest, EndsWhereTheDefinitionSays) {
  Random random(3);
  const std::vector<std::string> letters{"a", "b", "<|im_start|>", "<|im_end|>"};
  const auto text = [&](std::uint32_t longest, std::uint32_t kinds) {
    std::string made;
    for (std::uint32_t i = 1 + random.below(longest); i > 0; --i) made += letters[random.below(kinds)];
    return made;
  };
  int stopped = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const std::vector<std::string> strings{text(5, 2), text(3, 4), text(2, 4)};
    const Ids reply = ids(text(12, 4));
    // The definition: for each end and each string, the ids that count for the string, as texts.
    std::string expected = tokenizer->decode(reply);
    bool found = false;
    for (std::size_t end = 1; end <= reply.size() && !found; ++end) {
      std::size_t longest = 0;
      for (const auto& string : strings) {
        const Ids own = ids(string);
        Ids counting;
        for (const auto id : std::span(reply).first(end)) {
          if (id < 256 || std::find(own.begin(), own.end(), id) != own.end()) counting.push_back(id);
        }
        const bool last_counts = !counting.empty() && counting.back() == reply[end - 1];
        if (!last_counts || counting.size() < own.size()) continue;
        if (!std::equal(own.rbegin(), own.rend(), counting.rbegin())) continue;
        found = true;
        longest = std::max(longest, tokenizer->decode(own).size());
      }
      const auto before = tokenizer->decode(std::span(reply).first(end));
      if (found) expected = before.substr(0, before.size() - longest);
    }
    EXPECT_EQ(whole(strings, reply), std::pair(expected, found)) << strings[0] << ' ' << strings[1];
    stopped += found;
  }
  EXPECT_GT(stopped, 500);
  EXPECT_LT(stopped, 2900);
}

TEST_F(ReplyTextTest, ThePlaceOfAStopStringIsFoundInIds) {
  ReplyText reply(*tokenizer, {"b<|im_end|>"});
  pushed(reply, {'a', 'b', kTurnStart, kTurnEnd});
  ASSERT_TRUE(reply.stopped());
  EXPECT_EQ(reply.stop_symbols().size(), 2U);
  EXPECT_EQ(reply.symbols_for_stop(kTurnEnd), reply.stop_symbols().substr(1));
  EXPECT_TRUE(reply.symbols_for_stop(kTurnStart).empty());
  EXPECT_EQ(reply.symbols_of(kTextEnd), 1U);
}

}  // namespace
}  // namespace efla::engine
