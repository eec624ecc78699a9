// Numbers in fp16 as fp32, on any processor.
#pragma once
#include <stdint.h>
#include <string.h>

static inline float half(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest < 0x0400) {  // zero, or a number without the leading one
        float small = (float)rest * 0x1p-24f;
        return sign ? -small : small;
    }
    // The exponent is rebased by 112; infinities and NaNs keep theirs at the top.
    uint32_t whole = sign | ((rest << 13) + (rest >= 0x7c00 ? 0x70000000u : 0x38000000u));
    float value;
    memcpy(&value, &whole, 4);
    return value;
}
