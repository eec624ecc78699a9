// Entries of the kernels of four-bit weights for the tests; each kernel of the .cu file can be given by its address.
#include "launch.h"
#include "sm90_int4_gemm.cu"

// `x_map`: null for kernels that read x by themselves. `resident`: CTAs that share an SM.
extern "C" void run_int4(void* kernel, const CUtensorMap* x_map, const stoker::Int4Arguments* p, int resident,
                         const Launch* l) {
  emulator::resident = resident;
  run(l, [=] {
    if (x_map) {
      reinterpret_cast<void (*)(CUtensorMap, stoker::Int4Arguments)>(kernel)(*x_map, *p);
    } else {
      reinterpret_cast<void (*)(stoker::Int4Arguments)>(kernel)(*p);
    }
  });
}

extern "C" int int4_arguments_size() { return sizeof(stoker::Int4Arguments); }
