// Signatures of states that leave the server: a client may keep a state and send it back, but not change it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace efla::serve {

class StateKeys {
 public:
  // Without a key nothing is signed, and every state is taken.
  StateKeys() = default;
  // The first key signs; states signed with any of them are taken.
  explicit StateKeys(std::vector<std::string> keys) : keys_(std::move(keys)) {}

  // Returns a session's file with "signature" in its metadata: HMAC-SHA256 (FIPS 198-1) of the file in which these 64
  // hexadecimal digits are zeros.
  std::string sign(std::string file) const;

  // Throws ApiError with status 400 that names the field, unless the file has a signature by one of the keys.
  void require_signature(std::string_view file, const std::string& field) const;

 private:
  std::vector<std::string> keys_;
};

}  // namespace efla::serve
