// Rounds numbers to blocks of quant_block.h. A scale has the range of float16. All numbers of a block are NaN if one
// that is rounded is not finite.
#pragma once

#include <cstdint>
#include <span>

namespace efla {

// Writes a block of Q8_0, with the largest magnitude / 127 as scale, as llama.cpp rounds it.
void quantise_q8_0(std::span<const float, 32> numbers, std::uint8_t* block);

// Writes a block of Q4_0, with the number of the largest magnitude / −8 as scale. The integers, from −8 to 7, are
// multiples of the scale after it is rounded to float16.
void quantise_q4_0(std::span<const float, 32> numbers, std::uint8_t* block);

}  // namespace efla
