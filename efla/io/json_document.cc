// Parses JSON. The values are built here, because nlohmann's own builder walks through a whole list at the end of each
// object in it when it has a callback.
#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>

#include "efla/io/content_error.h"
#include "efla/io/json.h"

namespace efla::io {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxDepth = 256;  // no metric, configuration or request is nested deeper
constexpr std::ptrdiff_t kHoldStep = 64 << 10;

// Iterates over bytes and counts the bytes that were read, because the parser does not say where it is.
struct CountingIterator {
  using iterator_category = std::input_iterator_tag;
  using value_type = std::uint8_t;
  using difference_type = std::ptrdiff_t;
  using pointer = const std::uint8_t*;
  using reference = const std::uint8_t&;

  reference operator*() const { return *at; }
  CountingIterator& operator++() {
    ++at;
    ++*read;
    return *this;
  }
  bool operator==(const CountingIterator& other) const { return at == other.at; }

  pointer at;
  std::size_t* read;
};

// Returns the bytes that malloc takes for `size` bytes.
constexpr std::ptrdiff_t allocated(std::size_t size) {
  return static_cast<std::ptrdiff_t>(std::max<std::size_t>(32, (size + 23) / 16 * 16));
}

// Returns the bytes that a text takes outside of its std::string. Of a large text only the pages in use count.
std::ptrdiff_t allocated(const std::string& text) {
  constexpr std::size_t kInside = 15, kLarge = 64 << 10;
  if (text.capacity() <= kInside) return 0;
  return allocated(text.size() < kLarge ? text.capacity() + 1 : text.size());
}

// Returns the bytes of the longest text in JSON, with its escapes.
std::size_t longest_text(ByteView json) {
  std::size_t longest = 0;
  for (std::size_t i = 0; i < json.size(); ++i) {
    if (json[i] != '"') continue;
    const auto begin = ++i;
    while (i < json.size() && json[i] != '"') i += json[i] == '\\' ? 2 : 1;
    longest = std::max(longest, std::min(i, json.size()) - begin);
  }
  return longest;
}

// Removes the last value of a list, or the first member of an object.
void remove_one(json& parent) {
  if (parent.is_array()) return parent.get_ref<json::array_t&>().pop_back();
  auto& members = parent.get_ref<json::object_t&>();
  members.erase(members.begin());
}

// Empties a value, the innermost values first, so that no destructor finds a value inside of a value.
void dismantle(json& value) {
  std::array<json*, kMaxDepth + 2> path;  // from the value to one inside of it
  std::size_t depth = 0;
  path[0] = &value;
  for (;;) {
    json& current = *path[depth];
    if (current.is_array() && !current.empty()) {
      path[++depth] = &current.get_ref<json::array_t&>().back();
    } else if (current.is_object() && !current.empty()) {
      path[++depth] = &current.get_ref<json::object_t&>().begin()->second;
    } else {
      if (depth == 0) return;
      remove_one(*path[--depth]);
    }
  }
}

// Builds a value of what nlohmann's parser reports.
class Builder : public nlohmann::json_sax<json> {
 public:
  // held: what was reported to `hold`.
  Builder(json& root, ByteView text, const std::string& path, std::size_t start, const JsonDocument::Hold& hold,
          std::ptrdiff_t& held)
      : root_(root), text_(text), path_(path), start_(start), hold_(hold), held_(held) {}

  // Parses the text.
  void parse() {
    const auto parser = 2 * static_cast<std::ptrdiff_t>(longest_text(text_));  // the lexer keeps a text twice
    count(parser);
    const CountingIterator begin{text_.data(), &read_}, end{text_.data() + text_.size(), &read_};
    json::sax_parse(begin, end, this);
    count(-parser);
    report();
  }

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(std::int64_t value) override { return add(value); }
  bool number_unsigned(std::uint64_t value) override { return add(value); }
  bool number_float(double value, const std::string&) override { return add(value); }
  bool string(std::string& value) override {
    count(allocated(sizeof(value)) + allocated(value));
    return add(std::move(value));
  }
  bool binary(json::binary_t&) override { return false; }  // not in JSON
  bool start_object(std::size_t) override { return open(json::value_t::object, sizeof(json::object_t)); }
  bool start_array(std::size_t) override { return open(json::value_t::array, sizeof(json::array_t)); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(std::string& name) override {
    constexpr std::size_t kNode = 4 * sizeof(void*) + sizeof(json::object_t::value_type);
    count(allocated(kNode) + allocated(name));
    member_ = &open_[depth_ - 1]->get_ref<json::object_t&>()[std::move(name)];
    dismantle(*member_);  // of several members with one name the last one counts
    return true;
  }
  bool parse_error(std::size_t position, const std::string& token, const json::exception& error) override {
    if (dynamic_cast<const json::out_of_range*>(&error) != nullptr) {
      fail_at(path_, start_ + position - token.size(), "a number beyond float64");
    }
    const std::string_view reason = error.what();
    const auto says = [&](std::string_view words) { return reason.find(words) != std::string_view::npos; };
    // nlohmann counts bytes from 1, and returns 0 for an empty text.
    fail_at(path_, start_ + (position > 0 ? position - 1 : 0),
            says("ill-formed UTF-8") ? "not JSON: not UTF-8"
            : says("surrogate")      ? "not JSON: half of a surrogate pair"
                                     : "not JSON");
  }

 private:
  // Adds memory that is about to be allocated, or subtracts memory that was freed.
  void count(std::ptrdiff_t bytes) {
    pending_ += bytes;
    if (pending_ >= kHoldStep || pending_ <= -kHoldStep) report();
  }
  void report() {
    if (hold_) hold_(pending_);
    held_ += std::exchange(pending_, 0);
  }

  // Returns the place of the next value.
  json& place() {
    if (depth_ == 0) return root_;
    if (open_[depth_ - 1]->is_object()) return *member_;
    auto& list = open_[depth_ - 1]->get_ref<json::array_t&>();
    if (list.size() == list.capacity()) {
      const auto before = list.capacity();
      const auto after = std::max<std::size_t>(1, 2 * before);
      count(allocated(after * sizeof(json)));
      list.reserve(after);
      if (before > 0) count(-allocated(before * sizeof(json)));
    }
    return list.emplace_back();
  }
  template <class Value>
  bool add(Value&& value) {
    place() = json(std::forward<Value>(value));
    return true;
  }
  bool open(json::value_t type, std::size_t size) {
    if (depth_ > kMaxDepth) {
      fail_at(path_, start_ + read_ - 1, "JSON nested deeper than " + std::to_string(kMaxDepth));
    }
    count(allocated(size));
    open_[depth_] = &place();
    *open_[depth_++] = json(type);
    return true;
  }
  bool close() {
    --depth_;
    return true;
  }

  json& root_;
  const ByteView text_;
  const std::string& path_;
  const std::size_t start_;
  const JsonDocument::Hold& hold_;
  std::size_t read_ = 0;                     // bytes
  std::array<json*, kMaxDepth + 1> open_{};  // the lists and objects that have not ended
  std::size_t depth_ = 0;
  json* member_ = nullptr;  // the last member that was named, of the innermost object
  std::ptrdiff_t& held_;
  std::ptrdiff_t pending_ = 0;  // bytes that are not reported
};

}  // namespace

JsonDocument::JsonDocument(ByteView text, const std::string& path, std::size_t start, Hold hold)
    : hold_(std::move(hold)) {
  try {
    Builder(value_, text, path, start, hold_, held_).parse();
  } catch (...) {
    dismantle(value_);
    if (hold_) hold_(-held_);
    throw;
  }
}

JsonDocument::~JsonDocument() {
  dismantle(value_);
  if (hold_) hold_(-held_);
}

nlohmann::json parse_json(ByteView text, const std::string& path, std::size_t start) {
  return JsonDocument(text, path, start).take();
}

}  // namespace efla::io
