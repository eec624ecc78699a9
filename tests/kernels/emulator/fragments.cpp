// Entries of the kernels of weights in fragments for the tests, of the one source that lies beside this file; each kernel
// of it can be given by its address.
#include "launch.h"
#if __has_include("sm90_int4_gemm.cu")
#include "sm90_int4_gemm.cu"
#elif __has_include("sm90_int8_gemm.cu")
#include "sm90_int8_gemm.cu"
#else
#include "sm90_fp4_gemm.cu"
#endif

// `x_map`: null for kernels that read x by themselves. `resident`: CTAs that share an SM.
extern "C" void run_fragments(void* kernel, const CUtensorMap* x_map, const stoker::FragmentArguments* p, int resident,
                              const Launch* l) {
  emulator::resident = resident;
  run(l, [=] {
    if (x_map) {
      reinterpret_cast<void (*)(CUtensorMap, stoker::FragmentArguments)>(kernel)(*x_map, *p);
    } else {
      reinterpret_cast<void (*)(stoker::FragmentArguments)>(kernel)(*p);
    }
  });
}

extern "C" int fragment_arguments_size() { return sizeof(stoker::FragmentArguments); }
