// Blocks of 32 columns of GGUF in the order in which products read them, and what both products share of it.
//
// Sixteen rows lie side by side (a group), one in each lane, so that scales are a vector and nothing is summed across
// lanes. Of a block of a group there come: `planes` times 256 bytes of half codes, the 16 scales in fp16, and for Q4_1
// its 16 offsets. That is what the file's blocks take, so that a matrix is packed where it lies. A code of 8 bits is the
// sum of a multiple of 16 and a number below 16.
#pragma once
#include <stdint.h>

#define GROUP 16
#define COLUMNS 32
#define PLANE 256

// The order is that of PACKED in cpu_packed.py. `low`: the table of the lower half codes, `high` of the upper ones.
static const struct { int planes, offset, bytes; short low[16], high[16]; } KINDS[] = {
    {2, 0, 34, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
     {0, 16, 32, 48, 64, 80, 96, 112, -128, -112, -96, -80, -64, -48, -32, -16}},
    {1, 0, 18, {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}, {0}},
    {1, 1, 20, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {0}},
    {1, 0, 18, {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, {0}},
};

// Rows of one format; those of the pieces of a weight follow each other.
struct Piece {
    int64_t kind;
    const uint8_t *weight;
    int64_t rows;
};

// y[m, n] = sum over k of weight[n, k] · x[m, k] + bias[n]. `sums` is scratch [tokens, columns / 32]; bias is fp32, or 0;
// `groups` are those of all pieces, of which a part has `step`; `wide`: y is fp32.
struct Work {
    const struct Piece *pieces;
    const void *x;
    float *sums;
    const float *bias;
    void *y;
    long count, columns, tokens, stride, groups, step;
    int wide, threads;
};
