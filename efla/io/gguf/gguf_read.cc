#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "efla/base/printable.h"
#include "efla/io/content_error.h"
#include "efla/io/gguf/gguf.h"

namespace efla::io {
namespace {

constexpr std::uint32_t kGgufMagic = 0x46554747;  // "GGUF"
constexpr std::int64_t kUsualAlignment = 32, kMostAlignment = 1 << 16;
constexpr std::uint32_t kMostExtents = 4;
constexpr std::uint64_t kLongestKey = (1 << 16) - 1;
constexpr std::size_t kLongestShownKey = 200;

constexpr GgufType kGgufTypes[]{
    {0, "F32", 1, 4},         {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},      {3, "Q4_1", 32, 20},
    {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},      {8, "Q8_0", 32, 34},      {9, "Q8_1", 32, 36},
    {10, "Q2_K", 256, 84},    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},
    {14, "Q6_K", 256, 210},   {15, "Q8_K", 256, 292},   {16, "IQ2_XXS", 256, 66}, {17, "IQ2_XS", 256, 74},
    {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},   {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},
    {22, "IQ2_S", 256, 82},   {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},         {25, "I16", 1, 2},
    {26, "I32", 1, 4},        {27, "I64", 1, 8},        {28, "F64", 1, 8},        {29, "IQ1_M", 256, 56},
    {30, "BF16", 1, 2},       {34, "TQ1_0", 256, 54},   {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},
    {40, "NVFP4", 64, 36},    {41, "Q1_0", 128, 18},    {42, "Q2_0", 64, 18}};

// The types of values in the metadata.
enum class ValueType : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, text, array, u64, i64, f64 };

std::string short_name(std::string_view name) { return efla::printable(name, kLongestShownKey); }

// Reads a file from its start. Numbers are little-endian.
class GgufCursor {
 public:
  GgufCursor(ByteView bytes, const std::string& path) : bytes_(bytes), path_(path) {}

  std::size_t offset() const { return offset_; }
  std::size_t left() const { return bytes_.size() - offset_; }
  ByteView all() const { return bytes_; }
  [[noreturn]] void fail(const std::string& what) const { fail_at(path_, offset_, what); }

  template <class T>
  T number() {
    static_assert(std::endian::native == std::endian::little);
    T value;
    if (left() < sizeof(T)) fail_at(path_, bytes_.size(), "the file is cut short in its header");
    std::memcpy(&value, bytes_.data() + offset_, sizeof(T));
    offset_ += sizeof(T);
    return value;
  }
  // Reads a number of things, each of which takes at least this many bytes.
  std::uint64_t count(std::uint64_t least_bytes, const char* what) {
    const auto count = number<std::uint64_t>();
    if (count > left() / least_bytes) {
      fail(fmt::format("a header with {} {} needs more than the {} bytes that follow", count, what, left()));
    }
    return count;
  }
  std::string_view text() {
    const auto size = count(1, "bytes of text");
    const std::string_view text(reinterpret_cast<const char*>(bytes_.data() + offset_), size);
    offset_ += size;
    return text;
  }
  std::string name(const char* what) {
    const auto name = text();
    if (name.size() > kLongestKey) fail(fmt::format("a {} of {} bytes", what, name.size()));
    return std::string(name);
  }

 private:
  ByteView bytes_;
  const std::string& path_;
  std::size_t offset_ = 0;
};

template <class T>
std::int64_t integer(GgufCursor& from) {
  const T value = from.number<T>();
  if (!std::in_range<std::int64_t>(value)) from.fail("an integer beyond 63 bits");
  return static_cast<std::int64_t>(value);
}

// Reads a number or a text, and calls `take` with it as bool, int64, double or a view.
template <class Take>
void read_single(GgufCursor& from, ValueType type, const Take& take) {
  switch (type) {
    case ValueType::u8:
      return take(integer<std::uint8_t>(from));
    case ValueType::i8:
      return take(integer<std::int8_t>(from));
    case ValueType::u16:
      return take(integer<std::uint16_t>(from));
    case ValueType::i16:
      return take(integer<std::int16_t>(from));
    case ValueType::u32:
      return take(integer<std::uint32_t>(from));
    case ValueType::i32:
      return take(integer<std::int32_t>(from));
    case ValueType::u64:
      return take(integer<std::uint64_t>(from));
    case ValueType::i64:
      return take(integer<std::int64_t>(from));
    case ValueType::f32:
      return take(static_cast<double>(from.number<float>()));
    case ValueType::f64:
      return take(from.number<double>());
    case ValueType::boolean:
      return take(from.number<std::uint8_t>() != 0);
    case ValueType::text:
      return take(from.text());
    case ValueType::array:
      break;
  }
  from.fail(fmt::format("a value of the unknown type {}", static_cast<std::uint32_t>(type)));
}

template <class T>
GgufValue read_elements(GgufCursor& from, ValueType type, std::uint64_t count) {
  std::vector<T> values;
  for (std::uint64_t i = 0; i < count; ++i) {
    read_single(from, type, [&](auto value) {
      if constexpr (std::is_same_v<decltype(value), std::string_view> == std::is_same_v<T, std::string_view>) {
        values.push_back(static_cast<T>(value));
      }
    });
  }
  return values;
}

GgufValue read_value(GgufCursor& from) {
  const auto type = static_cast<ValueType>(from.number<std::uint32_t>());
  GgufValue value;
  if (type != ValueType::array) {
    read_single(from, type, [&](auto single) { value = single; });
    return value;
  }
  const auto of = static_cast<ValueType>(from.number<std::uint32_t>());
  const bool is_text = of == ValueType::text;
  const auto count = from.count(is_text ? sizeof(std::uint64_t) : 1, "elements of an array");
  if (of == ValueType::array) from.fail("an array of arrays, which is not supported");
  if (is_text) return read_elements<std::string_view>(from, of, count);
  if (of == ValueType::f32 || of == ValueType::f64) return read_elements<double>(from, of, count);
  return read_elements<std::int64_t>(from, of, count);
}

// A tensor whose data is not found yet.
struct GgufEntry {
  GgufTensor tensor;
  std::uint64_t begin = 0, size = 0;  // of its data, from the beginning of all data
  std::size_t offset = 0;             // of the entry in the file
};

GgufEntry read_gguf_entry(GgufCursor& from) {
  GgufEntry entry;
  entry.offset = from.offset();
  GgufTensor& tensor = entry.tensor;
  tensor.name = from.name("tensor's name");
  const auto fail = [&](const std::string& what) { from.fail("tensor \"" + short_name(tensor.name) + "\" " + what); };
  const auto extents = from.number<std::uint32_t>();
  if (extents < 1 || extents > kMostExtents)
    fail(fmt::format("has {} extents, expected 1 to {}", extents, kMostExtents));
  std::uint64_t elements = 1;
  for (std::uint32_t i = 0; i < extents; ++i) {
    const auto extent = from.number<std::uint64_t>();
    const bool fits = extent > 0 && !__builtin_mul_overflow(elements, extent, &elements);
    if (!fits || elements > std::uint64_t{1} << 56) fail(fmt::format("has an extent of {}", extent));
    tensor.shape.insert(tensor.shape.begin(), static_cast<std::int64_t>(extent));
  }
  const auto id = from.number<std::uint32_t>();
  tensor.type = find_gguf_type(id);
  if (tensor.type == nullptr) fail(fmt::format("has the unknown type {}", id));
  if (tensor.shape.back() % tensor.type->elements != 0) {
    fail(fmt::format("has rows of {} elements, expected whole blocks of {} for {}", tensor.shape.back(),
                     tensor.type->elements, tensor.type->name));
  }
  entry.size =
      elements / static_cast<std::uint64_t>(tensor.type->elements) * static_cast<std::uint64_t>(tensor.type->bytes);
  entry.begin = from.number<std::uint64_t>();
  return entry;
}

// Throws IoError(content) unless the data of the tensors are aligned and lie in the file, each behind the last one.
void check_gguf_data(std::vector<const GgufEntry*> entries, std::uint64_t alignment, std::uint64_t available,
                     const std::string& path) {
  std::ranges::sort(entries, {}, [](const GgufEntry* entry) { return entry->begin; });
  std::uint64_t end = 0;
  for (const GgufEntry* entry : entries) {
    const auto fail = [&](const std::string& what) {
      fail_at(path, entry->offset, "tensor \"" + short_name(entry->tensor.name) + "\" " + what);
    };
    if (entry->begin % alignment != 0)
      fail(fmt::format("begins at {}, expected a multiple of {}", entry->begin, alignment));
    if (entry->begin > available || entry->size > available - entry->begin) {
      fail(fmt::format("has {} bytes from {}, but the file ends {} bytes behind its header", entry->size, entry->begin,
                       available));
    }
    if (entry->begin < end) fail("overlaps another tensor");
    end = entry->begin + entry->size;
  }
}

std::uint64_t alignment_of(const GgufMetadata& metadata, const std::string& path) {
  const auto found = metadata.find("general.alignment");
  if (found == metadata.end()) return kUsualAlignment;
  const auto* value = std::get_if<std::int64_t>(&found->second);
  if (value == nullptr || *value < 8 || *value > kMostAlignment ||
      !std::has_single_bit(static_cast<std::uint64_t>(*value))) {
    fail_in(path, fmt::format("general.alignment: expected a power of two from 8 to {}", kMostAlignment));
  }
  return static_cast<std::uint64_t>(*value);
}

}  // namespace

const GgufType* find_gguf_type(std::uint32_t id) {
  const auto* found = std::ranges::find(kGgufTypes, id, &GgufType::id);
  return found == std::end(kGgufTypes) ? nullptr : found;
}

const GgufType* find_gguf_type(std::string_view name) {
  const auto* found = std::ranges::find(kGgufTypes, name, &GgufType::name);
  return found == std::end(kGgufTypes) ? nullptr : found;
}

GgufContent parse_gguf(ByteView bytes, const std::string& path) {
  GgufCursor from(bytes, path);
  if (bytes.size() < sizeof(kGgufMagic) || from.number<std::uint32_t>() != kGgufMagic) {
    fail_at(path, 0, "does not begin with GGUF (not a GGUF file?)");
  }
  const auto version = from.number<std::uint32_t>();
  if (version != 2 && version != 3) {
    const bool swapped = version > 0 && (version & 0xFFFF) == 0;
    fail_at(path, sizeof(kGgufMagic),
            swapped ? "is a big-endian GGUF file, expected a little-endian one"
                    : fmt::format("has version {} of GGUF, expected 2 or 3", version));
  }
  const auto tensors = from.count(1, "tensors"), values = from.count(1, "values");
  GgufContent content;
  for (std::uint64_t i = 0; i < values; ++i) {
    const auto key = from.name("key");
    if (content.metadata.contains(key)) from.fail("the key \"" + short_name(key) + "\" occurs twice");
    content.metadata.emplace(key, read_value(from));
  }
  std::vector<GgufEntry> entries;
  std::set<std::string_view> names;
  for (std::uint64_t i = 0; i < tensors; ++i) entries.push_back(read_gguf_entry(from));
  std::vector<const GgufEntry*> sorted;
  for (const auto& entry : entries) {
    if (!names.insert(entry.tensor.name).second) {
      fail_at(path, entry.offset, "the tensor \"" + short_name(entry.tensor.name) + "\" occurs twice");
    }
    sorted.push_back(&entry);
  }
  const auto alignment = alignment_of(content.metadata, path);
  const std::uint64_t start =
      std::min<std::uint64_t>((from.offset() + alignment - 1) / alignment * alignment, bytes.size());
  check_gguf_data(std::move(sorted), alignment, bytes.size() - start, path);
  for (auto& entry : entries) {
    entry.tensor.bytes = bytes.subspan(start + entry.begin, entry.size);
    content.tensors.push_back(std::move(entry.tensor));
  }
  return content;
}

GgufFile::GgufFile(const std::filesystem::path& path) {
  content_ = parse_gguf(files_.emplace_back(path).bytes(), path.string());
  open_others();
  for (std::size_t i = 0; i < content_.tensors.size(); ++i) {
    if (!where_.emplace(content_.tensors[i].name, i).second) {
      fail_in(this->path(), "the tensor \"" + short_name(content_.tensors[i].name) + "\" occurs in two of its files");
    }
  }
}

// Opens the other files of a split model, which the first file counts.
void GgufFile::open_others() {
  constexpr std::int64_t kMostFiles = 99'999;
  const auto *count = integer("split.count"), *number = integer("split.no");
  if (count == nullptr || *count == 1) return;
  if (number == nullptr || *number != 0) {
    fail_in(path(), "is not the first of the files of its model: give the path of the one with -00001-of-");
  }
  const std::filesystem::path first = path();
  const auto name = first.filename().string();
  const auto end = fmt::format("-00001-of-{:05}.gguf", *count);
  if (*count < 1 || *count > kMostFiles || !name.ends_with(end)) {
    fail_in(path(), fmt::format("is the first of {} files, so that its name must end with {}", *count, end));
  }
  for (std::int64_t i = 1; i < *count; ++i) {
    const auto other = first.parent_path() /
                       fmt::format("{}-{:05}-of-{:05}.gguf", name.substr(0, name.size() - end.size()), i + 1, *count);
    auto content = parse_gguf(files_.emplace_back(other).bytes(), other.string());
    const auto found = content.metadata.find("split.no");
    const auto* own = found == content.metadata.end() ? nullptr : std::get_if<std::int64_t>(&found->second);
    if (own == nullptr || *own != i) fail_in(other.string(), fmt::format("split.no: expected {}", i));
    std::ranges::move(content.tensors, std::back_inserter(content_.tensors));
  }
  const auto* total = integer("split.tensors.count");
  if (total != nullptr && *total != std::ssize(content_.tensors)) {
    fail_in(path(),
            fmt::format("split.tensors.count: got {}, but its files have {} tensors", *total, content_.tensors.size()));
  }
}

const GgufTensor* GgufFile::find(std::string_view name) const {
  const auto found = where_.find(name);
  return found == where_.end() ? nullptr : &content_.tensors[found->second];
}

void GgufFile::refuse(std::string_view key, const char* expected) const {
  fail_in(path(), short_name(key) + ": expected " + expected);
}

}  // namespace efla::io
