// How far a NaN token reaches in the results of an algorithm, beside the float64 reference with the same token.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "efla/ref/delta.h"
#include "tests/support/delta_case.h"
#include "tests/support/delta_results.h"

namespace efla::test {

// A token of one head of an input all of whose elements are NaN.
struct NanToken {
  std::string_view input;        // q, k, erase_key, v, beta, g or dout
  std::int64_t sequence, token;  // the token counted from the sequence's first
  std::int64_t head;             // of q, k and erase_key a query head, of the others a value head

  std::int64_t heads_of(const DeltaShape& s) const {
    return input == "q" || input == "k" || input == "erase_key" ? s.heads : s.value_heads;
  }
};

// Sets the token's elements to NaN.
template <class T>
void spoil(DeltaData<T>& data, const NanToken& nan) {
  const Sequence at = sequence_of(data.forward(), nan.sequence);
  const std::int64_t t = at.begin + nan.token;
  const auto fill = [&](auto view) {
    for (std::int64_t i = 0; i < view.extent[3]; ++i) {
      view(at.i_b, t, nan.head, i) = from_state<std::remove_reference_t<decltype(view(0, 0, 0, 0))>>(NAN);
    }
  };
  if (nan.input == "q") fill(data.q.view());
  if (nan.input == "k") fill(data.k.view());
  if (nan.input == "erase_key") fill(data.erase_key.view());
  if (nan.input == "v") fill(data.v.view());
  if (nan.input == "g") fill(data.g.view());
  if (nan.input == "dout") fill(data.dout.view());
  if (nan.input == "beta") data.beta.view()(at.i_b, t, nan.head) = from_state<T>(NAN);
}

inline const std::vector<double>& values_of(const Results& results, std::string_view name) {
  return std::find_if(results.begin(), results.end(), [&](const auto& result) { return result.first == name; })->second;
}

// Returns where a NaN token reaches less or more than it may, or "". `clean`: results without the token; `reference`:
// the float64 reference's with it. A chunk of one head, or a state, is reached where the reference has a non-finite
// element, or where the chunk has the token itself. Results are non-finite where the reference's are, and have the same
// bits as without the token in all chunks and states that are not reached.
inline std::string beyond_reach(const DeltaCase& c, std::int64_t chunk, const NanToken& nan, const Results& clean,
                                const Results& spoiled, const Results& reference) {
  const DeltaShape s = c.shape();
  std::vector<std::int64_t> chunk_of;  // of a token of the batch
  std::int64_t chunks = 0, own = 0;
  for (std::int64_t n = 0; n < s.sequences(); ++n) {
    const std::int64_t tokens = s.packed > 0 ? c.cu_seqlens[n + 1] - c.cu_seqlens[n] : s.tokens;
    if (n == nan.sequence) own = chunks + nan.token / chunk;
    for (std::int64_t t = 0; t < tokens; ++t) chunk_of.push_back(chunks + t / chunk);
    chunks += (tokens + chunk - 1) / chunk;
  }
  for (const auto& [name, expected] : clean) {
    const std::vector<double>&got = values_of(spoiled, name), &exact = values_of(reference, name);
    const bool states = name.ends_with("state");
    const std::int64_t heads = name == "dq" || name == "dk" || name == "derase_key" ? s.heads : s.value_heads;
    const std::int64_t rows = states ? s.sequences() : std::ssize(chunk_of),
                       size = std::ssize(expected) / (rows * heads);
    const auto part_of = [&](std::int64_t i) {  // a chunk or a state of one head
      const std::int64_t row = i / size / heads;
      return (states ? row : chunk_of[row]) * heads + i / size % heads;
    };
    std::vector<bool> reached(heads * (states ? rows : chunks));
    for (std::int64_t h = 0; h < heads && !states; ++h) {
      const std::int64_t of_input = nan.heads_of(s);
      reached[own * heads + h] =
          heads == of_input ? h == nan.head : h * s.heads / heads == nan.head * s.heads / of_input;
    }
    for (std::int64_t i = 0; i < std::ssize(expected); ++i) {
      if (!std::isfinite(exact[i])) reached[part_of(i)] = true;
    }
    for (std::int64_t i = 0; i < std::ssize(expected); ++i) {
      const bool lost = !std::isfinite(exact[i]) && std::isfinite(got[i]);
      if (!lost && (reached[part_of(i)] || got[i] == expected[i])) continue;
      std::ostringstream text;
      text << name << (lost ? " loses the NaN" : " is reached") << " in row " << i / size / heads << ", head "
           << i / size % heads << ", element " << i % size << ": " << got[i] << ", without the NaN " << expected[i];
      return text.str();
    }
  }
  return "";
}

// The token of a sequence, counted from its first.
struct TokenAt {
  std::int64_t sequence, token;
};

// Spoils each input of a case at each of the tokens, in the last head, and expects the results of `run`, which computes
// a case, to be reached as they may be. `chunk`: tokens per chunk; 1 for the recurrence.
template <class T, class Run>
void expect_contained(const DeltaCase& c, std::int64_t chunk, const std::vector<TokenAt>& tokens, const Run& run) {
  DeltaData<T> data(c);
  const Results clean = run(data);
  for (const TokenAt& at : tokens) {
    for (const std::string_view input : {"q", "k", "erase_key", "v", "beta", "g", "dout"}) {
      if (input == "g" && c.decay == Decay::none) continue;
      if (input == "erase_key" && c.erase_key == EraseKey::none) continue;
      NanToken nan{input, at.sequence, at.token, 0};
      nan.head = nan.heads_of(c.shape()) - 1;
      DeltaData<T> spoiled(c);
      spoil(spoiled, nan);
      DeltaData<double> exact(c, spoiled);
      ref::recurrent_fwd(exact.forward());
      ref::recurrent_bwd(exact.backward());
      EXPECT_EQ(beyond_reach(c, chunk, nan, clean, run(spoiled), all_results(exact)), "")
          << input << " of token " << at.token << " of sequence " << at.sequence;
    }
  }
}

}  // namespace efla::test
