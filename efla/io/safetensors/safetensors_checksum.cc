#include "efla/io/safetensors/safetensors_checksum.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "efla/io/content_error.h"
#include "efla/io/crc32c.h"

namespace efla::io {
namespace {

constexpr const char* kChecksums = "efla.crc32c";
constexpr std::size_t kDigits = 8;  // of a checksum

// Returns the checksum of the metadata without the checksums themselves and without the signature, because the
// signature is filled in last.
std::uint32_t checksum_of(const std::map<std::string, std::string>& metadata) {
  std::uint32_t checksum = 0;
  for (const auto& [key, value] : metadata) {
    if (key == kChecksums || key == kSignature) continue;
    const std::string text = key + '\0' + value + '\0';
    checksum = crc32c(as_bytes(text), checksum);
  }
  return checksum;
}

// Returns the checksum of a tensor's name, type, shape and bytes.
std::uint32_t checksum_of(const NamedTensor& tensor) {
  const std::string text =
      tensor.name + '\0' + fmt::format("{} [{}]", type_name(tensor.type), fmt::join(tensor.shape, ","));
  return crc32c(tensor.bytes, crc32c(as_bytes(text)));
}

std::string digits_of(std::uint32_t checksum) { return fmt::format("{:08x}", checksum); }

}  // namespace

void add_checksums(std::span<const NamedTensor> tensors, std::map<std::string, std::string>& metadata) {
  std::string digits = digits_of(checksum_of(metadata));
  for (const auto& tensor : tensors) digits += digits_of(checksum_of(tensor));
  metadata.insert_or_assign(kChecksums, digits);
}

void check_checksums(ByteView start, SafetensorsContent& content, const std::string& path) {
  const auto entry = content.metadata.extract(kChecksums);
  if (entry.empty()) return;
  const std::string& digits = entry.mapped();
  const std::string hint =
      fmt::format("; a program that changes such a file must leave its metadata {} out", kChecksums);
  if (digits.size() != kDigits * (1 + content.tensors.size())) {
    fail_in(path, fmt::format("has {} digits of checksums, expected {} for each of {} tensors and one more{}",
                              digits.size(), kDigits, content.tensors.size(), hint));
  }
  if (digits.substr(0, kDigits) != digits_of(checksum_of(content.metadata))) {
    fail_in(path, "the metadata is damaged: its checksum differs" + hint);
  }
  for (std::size_t i = 0; i < content.tensors.size(); ++i) {
    const auto& tensor = content.tensors[i];
    if (digits.substr(kDigits * (1 + i), kDigits) == digits_of(checksum_of(tensor))) continue;
    fail_at(path, static_cast<std::uint64_t>(tensor.bytes.data() - start.data()),
            "tensor \"" + printable(tensor.name) + "\" is damaged: its checksum differs" + hint);
  }
}

}  // namespace efla::io
