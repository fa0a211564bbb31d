#include "efla/serve/api/keys.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <sstream>

#include "efla/base/error.h"
#include "efla/io/file.h"
#include "efla/io/sha256.h"
#include "efla/serve/http/syntax.h"

namespace efla::serve {
namespace {

constexpr std::string_view kScheme = "bearer";
constexpr std::size_t kClientDigits = 12;

}  // namespace

Keys::Keys(const std::vector<std::string>& keys) {
  for (const auto& key : keys) digests_.push_back(io::sha256(io::as_bytes(key)));
}

std::optional<std::string> Keys::client(std::string_view authorization) const {
  if (digests_.empty()) return "";
  if (lowercase(authorization.substr(0, kScheme.size())) != kScheme) return std::nullopt;
  authorization.remove_prefix(kScheme.size());
  const auto blanks =
      std::min(authorization.find_first_not_of(' '), authorization.size());  // RFC 9110, 11.4: at least 1
  if (blanks == 0) return std::nullopt;
  return client_of_key(authorization.substr(blanks));
}

std::optional<std::string> Keys::client_of_key(std::string_view key) const {
  if (digests_.empty()) return "";
  const auto digest = io::sha256(io::as_bytes(key));
  std::optional<std::string> client;
  for (const auto& known : digests_) {
    if (CRYPTO_memcmp(known.data(), digest.data(), digest.size()) == 0) client = known.substr(0, kClientDigits);
  }
  return client;
}

std::vector<std::string> read_keys(const std::filesystem::path& path, const std::string& option) {
  const auto bytes = io::read_file(path);
  std::istringstream text(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  std::vector<std::string> keys;
  for (std::string line; std::getline(text, line);) {
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
    if (!line.empty() && line.front() != '#') keys.push_back(line);
  }
  if (keys.empty()) throw Error("serve", option, path.string() + " without a key", "one key per line");
  return keys;
}

std::vector<std::string> read_client_keys(const std::filesystem::path& path, const std::string& option) {
  auto keys = read_keys(path, option);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto& key = keys[i];
    if (std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c <= '~'; })) continue;
    throw Error("serve", option,
                "a blank, a control character or a character beyond ASCII in key " + std::to_string(i + 1) + " of " +
                    path.string(),
                "keys that clients can send in a header");
  }
  return keys;
}

}  // namespace efla::serve
