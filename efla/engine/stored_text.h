// Texts between two requests, as the store of sessions and running requests share them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "efla/engine/session_record.h"
#include "efla/engine/stored.h"

namespace efla::engine {

// A text between two requests. Its last id may be pending: the state has not seen it.
struct StoredText {
  std::shared_ptr<StoredState> state;  // null: of an empty text
  SessionRecord record;                // counters[2]: tokens in the state

  // What rewinding needs; none for a disposable text and for one that was loaded.
  std::shared_ptr<const StoredText> before;  // the text before the last request, without a `before` of its own
  std::shared_ptr<StoredIds> since;          // the pending ids of `before`, then the ids of the last request
  std::size_t prefilled = 0;                 // the number of ids of `since` that were prefilled first
  std::size_t decoded = 0;  // the number of ids after these that were decoded; the others were prefilled

  CountedBytes counted;            // of the records
  mutable std::uint64_t used = 0;  // its place in the store's order of use

  std::int64_t state_tokens() const { return static_cast<std::int64_t>(record.counters[2]); }
  std::int64_t tokens() const { return state_tokens() + static_cast<std::int64_t>(record.pending.size()); }
  std::int64_t rewindable() const { return before ? tokens() - before->tokens() : 0; }
  // Returns the bytes of the records, which no other text shares and which never move to files.
  std::size_t record_bytes() const;
  // Calls f with everything that may move to a file, except that pages may come twice.
  template <class F>
  void for_each_part(F&& f) const {
    if (state) state->for_each_part(f);
    if (before && before->state) before->state->for_each_part(f);
    if (since) f(*since);
  }
};

}  // namespace efla::engine
