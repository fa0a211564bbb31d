// Every kernel for vector units is compiled twice: for rules with one key, and by the files in two_keys/, which define
// EFLA_TWO_KEYS, for rules with an erase key κ beside k. Neither pays for the other: what only two keys need is under
// `if constexpr (kTwoKeys)`.
#pragma once

#ifdef EFLA_TWO_KEYS
#define EFLA_KEYS two_keys
#else
#define EFLA_KEYS one_key
#endif

namespace efla::cpu {

#ifdef EFLA_TWO_KEYS
constexpr bool kTwoKeys = true;
#else
constexpr bool kTwoKeys = false;
#endif

}  // namespace efla::cpu
