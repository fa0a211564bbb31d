// API keys, compared in a time that does not tell how much of a key is right.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace efla::serve {

class Keys {
 public:
  // Without a key everybody is admitted.
  Keys() = default;
  explicit Keys(const std::vector<std::string>& keys);

  bool empty() const { return digests_.empty(); }

  // Returns the name of the client of a header "Authorization: Bearer KEY": the first digits of the key's SHA-256, or
  // "" where there are no keys. Returns nothing for a wrong key.
  std::optional<std::string> client(std::string_view authorization) const;
  // Returns the same for a key alone, as the header x-api-key has it.
  std::optional<std::string> client_of_key(std::string_view key) const;

 private:
  std::vector<std::string> digests_;  // hexadecimal SHA-256
};

// Reads the keys of an option's file, one per line; empty lines and lines that begin with # are skipped. Throws Error
// if there is no key, and IoError.
std::vector<std::string> read_keys(const std::filesystem::path& path, const std::string& option);

// Reads the keys of clients. Throws also for a key that clients cannot send in a header.
std::vector<std::string> read_client_keys(const std::filesystem::path& path, const std::string& option);

}  // namespace efla::serve
