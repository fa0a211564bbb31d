// The bytes of a session's file (docs/generation.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "efla/engine/session_record.h"
#include "efla/engine/stored_text.h"
#include "efla/nn/inference/text_run.h"

namespace efla::engine {

// What a state outside of a slot consists of.
struct StateLayout {
  std::vector<nn::StatePart> parts;  // of TextState::constant, one after the other without gaps
  std::int64_t pages = 0;            // of TextState::pages
  std::size_t page_bytes = 0;        // of each of them
  nn::KeyValueType page_type = nn::KeyValueType::float32;

  std::size_t constant_bytes() const {
    return parts.empty() ? 0 : (parts.back().offset + parts.back().floats) * sizeof(float);
  }
  std::size_t bytes() const { return constant_bytes() + static_cast<std::size_t>(pages) * page_bytes; }
};

class SessionFormat {
 public:
  // layout: of a state after this many tokens.
  SessionFormat(SessionModel model, std::function<StateLayout(std::int64_t tokens)> layout)
      : model_(std::move(model)), layout_(std::move(layout)) {}

  // Returns the bytes of a file. Throws IoError where the text has moved to files that cannot be read.
  std::string bytes(const StoredText& text, bool disposable = false) const;

  struct Session {
    std::shared_ptr<StoredText> text;
    bool disposable = false;
  };
  // Reads such bytes. Throws IoError(content) for bytes that are not a session, Error for a session of another model.
  // path is for messages.
  Session read(std::string_view bytes, const std::string& path, const std::shared_ptr<StoredPages>& pages) const;

  // Throws IoError(content) for a text whose bytes read() would refuse. checked: pages for which it did not throw.
  void check(const SessionRecord& record, const nn::TextState& state, std::size_t checked) const;

 private:
  std::vector<io::NamedTensor> tensors(const nn::TextState& state, std::size_t first_page) const;

  SessionModel model_;
  std::function<StateLayout(std::int64_t tokens)> layout_;
};

}  // namespace efla::engine
