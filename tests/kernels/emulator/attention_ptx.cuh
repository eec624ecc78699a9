#include "ptx.cuh"
