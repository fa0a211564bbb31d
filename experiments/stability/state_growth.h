// One head of the recurrence over many tokens, through the operator, and how its state grows.
#pragma once

#include <cstdint>
#include <vector>

#include "efla/rule/problem.h"

namespace efla::experiments {

inline constexpr std::int64_t kStateDim = 16;  // K = V
inline constexpr double kGrowthBound = 1e6;    // a state whose norm passes this has broken

// What sequences are made of, the same for every rule and precision: directions of keys and values of unit variance.
struct Stream {
  Stream(std::int64_t tokens, std::uint64_t seed);

  std::int64_t tokens;
  std::vector<float> directions;  // [tokens, K], of unit length
  std::vector<float> values;      // [tokens, V]
};

enum class Keys {
  repeated,  // one direction at every token, so that every token has the same eigenvalue along it
  random     // a new direction at every token
};

struct HeadRun {
  DeltaRule rule = {};
  double lambda = 1.0;  // ‖k‖² before rounding
  double beta = 1.0;
  Keys keys = Keys::repeated;
  std::int64_t direction = 0;  // of the stream, for repeated keys

  std::int64_t direction_at(std::int64_t token) const { return keys == Keys::repeated ? direction : token; }
};

struct Precision {
  bool bfloat16_inputs = false;
  bool bfloat16_state = false;  // with bfloat16 inputs: the state is rounded to bfloat16 after every token
};

struct Growth {
  double largest = 0;           // Frobenius norm of the state, the largest that was finite
  double last = 0;              // and after the last token; not finite if the state is not
  std::int64_t beyond = 0;      // tokens after which the norm first passed kGrowthBound; 0: never
  std::int64_t not_finite = 0;  // tokens after which the state was first not finite, where the run ends; 0: never
  std::vector<double> state;    // [K, V] after the last token
};

// Runs the recurrence of one head over the stream's tokens.
Growth grow(const Stream& stream, const HeadRun& head, const Precision& precision);

// Returns the last state [K, V] by the float64 reference, from the same inputs.
std::vector<double> reference_state(const Stream& stream, const HeadRun& head, bool bfloat16_inputs);

// Returns in float64 the eigenvalue 1 − aλ along a direction of the stream as the operator gets it: key and β rounded,
// and the key normalised if the rule says so.
double eigenvalue(const Stream& stream, const HeadRun& head, const Precision& precision, std::int64_t direction);

// Returns ‖got − want‖/‖want‖ in the Frobenius norm.
double relative_error(const std::vector<double>& got, const std::vector<double>& want);

}  // namespace efla::experiments
