// The functions of csrc/fragments_ptx.cuh, done by the emulator after PTX's definitions.
#pragma once
#include "ptx.cuh"

namespace stoker {

inline uint32_t raised(uint32_t word, int i) { return (word >> (4 * i) & 0x000F000Fu) | 0x43004300u; }
inline uint4 stream(const uint4* address) { return *address; }

}  // namespace stoker
