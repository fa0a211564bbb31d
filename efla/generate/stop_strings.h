// Strings that end a text, found while the text comes in pieces.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace efla::generate {

// Passes on a text up to the stop string that is complete first; where several end at the same byte, up to the longest.
// What may be the beginning of a stop string is held back until that is known. How the text is cut into pieces does not
// change what is passed on.
class StopStrings {
 public:
  // None is empty. held: what another one, with the same strings, had held back.
  explicit StopStrings(std::vector<std::string> strings, std::string held = {});

  // The text that is certain now. Nothing once it has stopped.
  std::string push(std::string_view piece);
  bool stopped() const { return stopped_; }

  const std::string& held() const { return held_; }
  // What was held back, for the end of a text that no stop string ended.
  std::string finish();

 private:
  std::vector<std::string> strings_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace efla::generate
