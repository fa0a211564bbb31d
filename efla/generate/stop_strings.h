// Finds the strings that end a text while the text arrives in pieces.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace efla::generate {

// Throws Error of the operation about "stop" unless every string is UTF-8 and not empty.
void require_stop_strings(const std::string& operation, const std::vector<std::string>& strings);

// Returns a text up to the stop string that is complete first; if several end at the same byte, up to the longest.
// Holds back what may be the start of a stop string until more text decides it. The result does not depend on how the
// text is cut into pieces.
class StopStrings {
 public:
  // No string may be empty. held: the text that another object with the same strings held back.
  explicit StopStrings(std::vector<std::string> strings, std::string held = {});

  // Returns the text that is certain now. Returns nothing after a stop.
  std::string push(std::string_view piece);
  bool stopped() const { return stopped_; }
  // Returns the stop string that ended the text; empty before.
  const std::string& matched() const { return matched_; }

  const std::string& held() const { return held_; }
  // Returns the text held back, at the end of a text that no stop string ended.
  std::string finish();

 private:
  std::vector<std::string> strings_;
  std::string held_, matched_;
  bool stopped_ = false;
};

}  // namespace efla::generate
